"""A run in bfloat16: its audit is held to its own rounding, and finds stamps that are off by one version.

So do the mismatches that it measures while it runs, of a server that is one version behind: by their means where a step
changes more than rounding does, by their slope down to smaller ones. Where less still moves, as with copied master
weights, the audit alone finds it, and by its slope alone.
"""

import shutil
from itertools import pairwise
from statistics import fmean

import pytest

from streamrl import cli
from streamrl.hub.model import with_local_model
from streamrl.lab.audit.command import audit
from streamrl.lab.audit.findings import Findings
from streamrl.observe.limits import LIMITS, Limits, of_rounding
from streamrl.observe.metrics import read_metrics
from streamrl.observe.mismatch import has_other_weights, together
from streamrl.places import load_run
from streamrl.types import PolicyVersion

LONGER = ("model.dtype=bfloat16", "generate.group_size=8", "generate.sampling.max_new_tokens=16")
EVERY = 2  # steps of a version: it stays long enough to be measured, and for some tokens to be drawn
MEASURED = (f"publish.every={EVERY}", "publish.mismatch=16")
SMALL = "learner.optimizer.lr=1e-5"  # that of configs/pretrained.yaml; the others have 1e-3
ANOTHER = "another version drew them"

LATE = """
from streamrl.publish.disk_source import DiskSource
from streamrl.publish.transports.disk import Disk


class LateSource(DiskSource):
    former = None

    def manifest(self, server, staged):
        described = super().manifest(server, staged)
        late, self.former = self.former or described, described
        return late


class Late(Disk):
    def source(self, at):
        return LateSource(at.run_folder / "published", at.config.model.path)
"""


def mismatches(run) -> list[dict[str, float]]:
    """The rows that have one, by the step of its version."""
    rows = [row for row in read_metrics(run.folder) if "mismatch/step" in row]
    assert [row["mismatch/step"] for row in rows] == sorted({row["mismatch/step"] for row in rows})
    return rows


def audited(run) -> Findings:
    findings = audit(run.folder, with_local_model(load_run(run.folder)))
    print(of_rounding(findings.differences), findings.limits, findings.before.slope(), findings.behind.slope())
    return findings


def exceeded(findings: Findings, limits: Limits) -> set[str]:
    """Which of the limits the differences are above."""
    found = of_rounding(findings.differences)
    return {name for name in ("largest", "p99", "mean") if getattr(found, name) > getattr(limits, name)}


@pytest.mark.slow
def test_the_audit_of_a_run_in_bfloat16_passes_its_stamps_and_finds_shifted_ones(make_run, capsys):
    run = make_run(steps=12).start(*LONGER, *MEASURED)
    code, output = run.finish()
    assert code == 0, output
    measured = mismatches(run)
    print(measured)
    assert len(measured) >= 3
    assert all(row["mismatch/step"] % EVERY == 0 and row["mismatch/step"] < row["step"] for row in measured)
    assert all(0 < row["mismatch/mean"] < row["mismatch/limit"] for row in measured)
    assert measured[-1]["mismatch/limit"] < LIMITS["bfloat16"].mean  # that of the run's own rounding
    assert all(abs(row["mismatch/slope"]) < 0.1 for row in measured)

    code = cli.main(["audit", str(run.folder)])
    told = capsys.readouterr().out
    print(told)
    assert code == 0
    assert "times what bfloat16 alone changes in Hugging Face" in told

    weights = run.folder / "weights"  # each version's place is taken by the one behind it
    versions = sorted(map(PolicyVersion.parse, (folder.name for folder in weights.iterdir())))
    (weights / str(versions[0])).rename(run.folder / "first")
    for before, behind in pairwise(versions):
        (weights / str(behind)).rename(weights / str(before))
    code = cli.main(["audit", str(run.folder)])
    told = capsys.readouterr().out
    print(told)
    assert code == 1
    assert ANOTHER in told
    assert "PROBLEM the mean of the differences is" in told
    assert "PROBLEM the 99th percentile of the differences is" in told


@pytest.fixture
def late_run(make_run, tmp_path):
    """`late_run(*overrides)`: a finished run whose server loads the version before each, and its rows about that."""
    (tmp_path / "late.py").write_text(LATE)

    def make(*overrides):
        transport = f"publish.transport={tmp_path / 'late.py'}:Late"
        run = make_run(steps=12).start(*LONGER, *MEASURED, transport, *overrides)
        code, output = run.finish()
        assert code == 0, output
        behind = [row for row in mismatches(run) if row["mismatch/step"] > EVERY]
        print(*({name: row[name] for name in row if name.startswith("mismatch/")} for row in behind), sep="\n")
        assert len(behind) >= 2
        return run, behind

    return make


@pytest.mark.slow
def test_a_server_that_is_one_version_behind_is_seen_in_the_rows_of_its_run_and_by_the_limits_of_its_audit(late_run):
    run, behind = late_run()
    for row in behind:
        assert row["mismatch/mean"] > row["mismatch/limit"]
        assert row["mismatch/slope"] > 0.9
        assert has_other_weights(row["mismatch/slope"], row["mismatch/slope_error"])
    findings = audited(run)
    assert {"p99", "mean"} <= exceeded(findings, findings.limits)


@pytest.mark.slow
def test_at_a_small_learning_rate_the_slope_of_the_rows_sees_such_a_server_and_their_means_do_not(late_run):
    run, behind = late_run(SMALL)
    assert all(row["mismatch/mean"] < row["mismatch/limit"] for row in behind)
    assert has_other_weights(*together([(row["mismatch/slope"], row["mismatch/slope_error"]) for row in behind]))
    findings = audited(run)
    assert exceeded(findings, findings.limits) == set()
    (problem,) = findings.problems
    assert ANOTHER in problem


@pytest.mark.slow
def test_where_a_step_changes_less_than_rounding_the_slope_of_the_audit_alone_sees_such_a_server(late_run):
    run, behind = late_run(SMALL, "learner.optimizer.dither=false")
    assert all(row["mismatch/mean"] < row["mismatch/limit"] for row in behind)  # the rows are blind to it
    slope, error = (fmean(row[name] for row in behind) for name in ("mismatch/slope", "mismatch/slope_error"))
    assert 0.2 < slope < 0.8
    assert not has_other_weights(slope, error)
    findings = audited(run)
    assert exceeded(findings, LIMITS["bfloat16"]) == set()  # as every limit was that was not measured
    assert exceeded(findings, findings.limits) == set()
    (problem,) = findings.problems
    assert ANOTHER in problem
    assert "before" in problem

    weights = run.folder / "weights"  # each version's become those that the server had
    _, *versions = sorted(map(PolicyVersion.parse, (folder.name for folder in weights.iterdir())))
    for before, version in reversed(list(pairwise(versions))):
        shutil.rmtree(weights / str(version))
        shutil.copytree(weights / str(before), weights / str(version))
    findings = audited(run)
    assert findings.problems == []
    assert findings.before.slope().tells

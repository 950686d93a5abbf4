"""A run in bfloat16: its audit is held to its own rounding, and finds stamps that are off by one step.

So do the mismatches that it measures while it runs, of a server that is one version behind.
"""

from itertools import pairwise

import pytest

from streamrl import cli
from streamrl.observe.limits import LIMITS
from streamrl.observe.metrics import read_metrics
from streamrl.observe.mismatch import has_other_weights
from streamrl.types import PolicyVersion

LONGER = ("model.dtype=bfloat16", "generate.group_size=8", "generate.sampling.max_new_tokens=16")
EVERY = 2  # steps of a version: it stays long enough to be measured, and for some tokens to be drawn
MEASURED = (f"publish.every={EVERY}", "publish.mismatch=16")

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
    assert "another version drew them" in told


@pytest.mark.slow
def test_a_server_that_is_one_version_behind_is_seen_in_the_rows_of_its_run(make_run, tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    transport = f"publish.transport={tmp_path / 'late.py'}:Late"
    run = make_run(steps=12).start(*LONGER, *MEASURED, transport)
    code, output = run.finish()
    assert code == 0, output
    behind = [row for row in mismatches(run) if row["mismatch/step"] > EVERY]
    print(behind)
    assert len(behind) >= 2
    for row in behind:
        assert row["mismatch/mean"] > row["mismatch/limit"]
        assert row["mismatch/slope"] > 0.9
        assert has_other_weights(row["mismatch/slope"], row["mismatch/slope_error"])

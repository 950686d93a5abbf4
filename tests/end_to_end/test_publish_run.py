"""Runs whose weights do not travel by broadcast."""

from pathlib import Path

import pytest

from streamrl import cli
from streamrl.observe.metrics import read_metrics
from streamrl.replay.journal import recorded_batches
from streamrl.types import PolicyVersion


@pytest.mark.slow
def test_a_run_by_disk_and_drain_trains_on_answers_of_one_version_each(make_run, capsys):
    run = make_run(steps=6)
    code, output = run.start("publish.transport=disk", "publish.interruption=drain").finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["staleness/max"] <= 2 for row in rows)
    samples = [sample for batch in recorded_batches(run.folder / "journal") for sample in batch.samples]
    assert all(len(sample.spans) == 1 for sample in samples)
    assert len({sample.spans[0].version for sample in samples}) > 2, "one version generated everything"
    published = sorted(PolicyVersion.parse(folder.name).step for folder in (run.folder / "published").iterdir())
    assert published == [5, 6]
    assert cli.main(["audit", str(run.folder)]) == 0
    assert f"tokens audited {sum(row['tokens/trained'] for row in rows)}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "publish",
    [
        ("publish.transport=memory", "publish.interruption=abort"),
        ("publish.transport=delta", "publish.interruption=retract", "stream.curve=on"),
    ],
)
def test_a_run_by_memory_or_by_what_changed_trains_on_exact_log_probs_and_leaves_no_segment(publish, make_run, capsys):
    run = make_run(steps=6)
    code, output = run.start(*publish, "publish.verify_every=1").finish()
    assert code == 0, output
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, 7))
    samples = [sample for batch in recorded_batches(run.folder / "journal") for sample in batch.samples]
    assert len({sample.spans[0].version for sample in samples}) > 2, "one version generated everything"
    assert cli.main(["audit", str(run.folder)]) == 0
    assert f"tokens audited {sum(row['tokens/trained'] for row in rows)}" in capsys.readouterr().out
    left = {path.name for path in Path("/dev/shm").iterdir()} - run.shared_memory
    assert not any("streamrl" in name for name in left)


@pytest.mark.slow
def test_a_run_in_place_stamps_what_updates_left_inexact_and_all_else_passes_the_audit(make_run, capsys):
    run = make_run(steps=10)
    # The rate makes versions differ by more than the audit allows.
    settings = ("publish.interruption=in_place", "generate.sampling.max_new_tokens=64", "learner.optimizer.lr=0.01")
    code, output = run.start(*settings).finish()
    assert code == 0, output
    samples = [sample for batch in recorded_batches(run.folder / "journal") for sample in batch.samples]
    spans = [span for sample in samples for span in sample.spans]
    inexact = sum(span.end - span.start for span in spans if not span.exact)
    assert 0 < inexact < sum(span.end - span.start for span in spans)
    assert len({span.version for span in spans if span.exact}) > 1, "one version generated everything"
    assert cli.main(["audit", str(run.folder)]) == 0
    told = capsys.readouterr().out
    trained = sum(row["tokens/trained"] for row in read_metrics(run.folder))
    assert f"tokens audited {trained - inexact}, tokens trained {trained}" in told
    assert f"tokens behind an update in place {inexact}, " in told

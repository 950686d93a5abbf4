"""Groups that are trained twice: learner and service are killed, and what the journal says is what was trained."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

from streamrl import cli
from streamrl.observe.events import read_events
from streamrl.observe.metrics import read_metrics
from streamrl.replay.history import recorded_batches

STEPS = 24
P = 4  # of make_run


@pytest.mark.slow
def test_a_run_with_reuse_whose_service_and_learner_are_killed_is_audited_and_retrains_bit_for_bit(
    make_run, tmp_path, capsys
):
    run = make_run(steps=STEPS).start("replay.reuse=2", "replay.reuse_max_age=4")
    run.wait_for(lambda: run.steps() >= 5)
    os.kill(_starts(run.folder, "replay-0")[-1], signal.SIGKILL)
    run.wait_for(lambda: len(_starts(run.folder, "replay-0")) == 2)
    at = run.steps()
    run.wait_for(lambda: run.steps() >= at + 4 and run.steps() % 4 == 2)  # two steps behind a checkpoint
    os.kill(_starts(run.folder, "learner-0")[-1], signal.SIGKILL)
    code, output = run.finish()
    assert code == 0, output
    assert len(_starts(run.folder, "learner-0")) == 2

    trained = [[group.group_id for group in batch.groups] for batch in recorded_batches(run.folder / "journal")]
    uses = Counter(group_id for ids in trained for group_id in ids)
    assert len(trained) == STEPS
    assert max(uses.values()) == 2
    assert all(len(set(ids)) == P for ids in trained)
    assert sorted(uses) == list(range(len(uses))), "a group was left out"
    rows = list(read_metrics(run.folder))
    assert sum(row["replay/reused"] for row in rows) == STEPS * P - len(uses) > STEPS
    assert max(row["staleness/max"] for row in rows) <= 4
    for row, batch in zip(rows, recorded_batches(run.folder / "journal"), strict=True):
        rewards = [sample.reward for group in batch.fresh for sample in group.answered]
        assert len(batch.reused) == row["replay/reused"]
        assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))

    assert cli.main(["audit", str(run.folder)]) == 0
    assert f"of them trained again {STEPS * P - len(uses)}" in capsys.readouterr().out
    assert cli.main(["retrain", str(run.folder), "--output", str(tmp_path / "again")]) == 0
    assert f"equal to the run's weights of step {STEPS}: bit for bit" in capsys.readouterr().out
    again = list(read_metrics(tmp_path / "again"))
    assert sum(row["tokens/generated"] for row in again) < sum(row["tokens/trained"] for row in again)


def _starts(run_folder, role: str) -> list[int]:
    """The process ids with which a role was started."""
    events = read_events(run_folder / "events" / f"{role}.jsonl")
    return [event["pid"] for event in events if event["event"] == "process.start"]

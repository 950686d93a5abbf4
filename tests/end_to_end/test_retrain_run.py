"""`streamrl retrain` after a crash: the surviving history gives the same weights, bit for bit."""

import os
import signal
from pathlib import Path

import pytest

from streamrl import cli
from streamrl.observe.events import read_events
from streamrl.observe.metrics import read_metrics

STEPS = 30


@pytest.mark.slow
def test_a_30_step_run_with_staleness_and_a_learner_killed_in_the_middle_retrains_bit_for_bit(
    make_run, tmp_path, capsys
):
    run = make_run(steps=STEPS).start()
    run.wait_for(lambda: run.steps() >= STEPS // 3)
    os.kill(_starts(run.folder)[-1], signal.SIGKILL)
    code, output = run.finish()
    assert code == 0, output
    assert len(_starts(run.folder)) == 2
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert sum(row["staleness/mean"] > 0 for row in rows) > STEPS // 2
    assert cli.main(["retrain", str(run.folder), "--output", str(tmp_path / "again")]) == 0
    assert f"equal to the run's weights of step {STEPS}: bit for bit" in capsys.readouterr().out


def _starts(run_folder: Path) -> list[int]:
    """The process ids with which the learner was started."""
    events = read_events(run_folder / "events" / "learner-0.jsonl")
    return [event["pid"] for event in events if event["event"] == "process.start"]

"""Every process may be killed at any time: the run goes on, or the same command resumes it, with the same groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl import cli
from streamrl.observe.events import read_events
from streamrl.observe.metrics import read_metrics
from streamrl.replay.history import recorded_batches

STEPS = 60  # enough that the kills come before the end on a fast machine
# what a step that is trained again on the same groups has in common with the first time, bit for bit
REPEATED = ("reward/mean", "tokens/trained", "staleness/mean", "loss/total", "grad_norm")


@pytest.mark.slow
def test_the_replay_service_and_a_learner_rank_are_killed_and_the_run_goes_on(make_run):
    run = make_run(steps=STEPS).start()
    run.wait_for(lambda: run.steps() >= 3)
    _kill(run.folder, "replay-0")
    run.wait_for(lambda: len(_starts(run.folder, "replay-0")) == 2)
    at = run.steps()
    run.wait_for(lambda: run.steps() >= at + 3 and run.steps() % 4 == 2)  # two steps behind a checkpoint
    _kill(run.folder, "learner-0")
    before = {row["step"]: row for row in read_metrics(run.folder)}
    code, output = run.finish()
    assert code == 0, output
    assert len(_starts(run.folder, "learner-0")) == 2
    assert cli.main(["audit", str(run.folder)]) == 0
    rows = {row["step"]: row for row in read_metrics(run.folder)}
    assert list(rows) == list(range(1, STEPS + 1))
    again = [step for step, row in before.items() if rows[step]["version"] != row["version"]]
    assert again, "no step was trained again"
    for step in again:
        assert {key: rows[step][key] for key in REPEATED} == {key: before[step][key] for key in REPEATED}
    _assert_every_group_is_trained_once(run.folder)


@pytest.mark.slow
def test_train_again_after_kill_9_of_the_supervisor_resumes_the_run(make_run):
    run = make_run(steps=STEPS).start()
    run.wait_for(lambda: run.steps() >= 6)
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    code, output = run.start().finish()  # at once: the former roles are still on their way out
    assert code == 0, output
    assert len(_starts(run.folder, "replay-0")) == 2
    assert cli.main(["audit", str(run.folder)]) == 0
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, STEPS + 1))
    _assert_every_group_is_trained_once(run.folder)


@pytest.mark.slow
def test_scripted_processes_are_killed_ten_times_and_nothing_is_lost_or_trained_twice():
    command = [sys.executable, "-m", "benchmarks.faults", "--kills", "10", "--order", "windowed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lost 0, trained twice 0, reordered 0, bound broken 0" in done.stdout


def _kill(run_folder: Path, role: str) -> None:
    os.kill(_starts(run_folder, role)[-1], signal.SIGKILL)


def _starts(run_folder: Path, role: str) -> list[int]:
    """The process ids with which a role was started."""
    events = read_events(run_folder / "events" / f"{role}.jsonl")
    return [event["pid"] for event in events if event["event"] == "process.start"]


def _assert_every_group_is_trained_once(run_folder: Path) -> None:
    batches = recorded_batches(run_folder / "journal")
    assert [group.group_id for batch in batches for group in batch.groups] == list(range(STEPS * 4))

"""`run.placement: shared` on real parts: server and learner take turns, whichever role is killed in whose turn."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from streamrl import cli
from streamrl.observe.events import read_events
from streamrl.observe.metrics import read_metrics
from streamrl.replay.history import recorded_batches

pytestmark = pytest.mark.slow

SHARED = ("run.placement=shared", "generate.threads=2", "learner.threads=2")
STEPS = 45  # enough that the kills come before the end on a fast machine
DEADLINE = 120.0  # seconds for a turn to come

# Whose turn it is, and who is killed in it.
KILLS = (
    ("servers", "generator-0"),
    ("learner", "learner-0"),
    ("handover", "replay-0"),
    ("learner", "generator-0"),
    ("servers", "learner-0"),
    ("learner", "replay-0"),
)


@pytest.fixture(scope="module")
def synchronous(make_run):
    """A complete run of staleness 0."""
    run = make_run(steps=8).start(*SHARED, "replay.max_staleness=0")
    run.wait_for(lambda: run.steps() >= 2)
    code, output = run.finish()
    assert code == 0, output
    return run


def test_the_server_draws_no_token_while_the_learner_trains(synchronous) -> None:
    steps = list(_spans(synchronous.folder, "learner.step"))
    turns = [
        (begin["time"], end["time"])
        for begin, end in pairwise(_devices(synchronous.folder))
        if begin["owner"] == "learner"
    ]
    assert len(steps) == 8
    for begin, end in steps:
        assert any(turn_begin <= begin and end <= turn_end for turn_begin, turn_end in turns)
    groups = [group for batch in recorded_batches(synchronous.folder / "journal") for group in batch.groups]
    assert len(groups) == 8 * 4
    for begin, end in steps:  # an answer comes in the servers' turn, or it was complete before
        assert not any(begin < group.finished < end for group in groups)
    assert all(row["staleness/max"] == 0 for row in read_metrics(synchronous.folder))
    synchronous.assert_nothing_is_left()


def test_the_learner_of_a_separate_placement_makes_the_same_weights_of_the_same_groups(
    synchronous, tmp_path: Path, capsys
) -> None:
    command = ["retrain", str(synchronous.folder), "--output", str(tmp_path / "again")]
    assert cli.main([*command, "--set", "run.placement=separate"]) == 0
    assert "equal to the run's weights of step 8: bit for bit" in capsys.readouterr().out
    assert cli.main(["audit", str(synchronous.folder)]) == 0


@pytest.mark.timeout(900)
def test_when_a_role_is_killed_in_any_turn_the_run_goes_on_and_trains_every_group_once(make_run) -> None:
    run = make_run(steps=STEPS).start(*SHARED)
    run.wait_for(lambda: run.steps() >= 3)
    for owner, role in KILLS:
        starts = len(_starts(run.folder, role))
        _kill_in_turn(run.folder, owner, role)
        run.wait_for(lambda role=role, starts=starts: len(_starts(run.folder, role)) == starts + 1)
        at = run.steps()
        run.wait_for(lambda at=at: run.steps() >= at + 3)
    code, output = run.finish()
    assert code == 0, output
    assert cli.main(["audit", str(run.folder)]) == 0
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, STEPS + 1))
    batches = recorded_batches(run.folder / "journal")
    assert [group.group_id for batch in batches for group in batch.groups] == list(range(STEPS * 4))
    run.assert_nothing_is_left()


def _kill_in_turn(run_folder: Path, owner: str, role: str) -> None:
    """Wait for a turn to begin, and kill the role in it."""
    before, deadline = len(_devices(run_folder)), time.monotonic() + DEADLINE
    while True:
        devices = _devices(run_folder)
        if len(devices) > before and devices[-1]["owner"] == owner:
            os.kill(_starts(run_folder, role)[-1], signal.SIGKILL)
            return
        assert time.monotonic() < deadline, f"the turn of {owner} did not come"


def _devices(run_folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run_folder / "events" / "replay-0.jsonl") if event["event"] == "devices"]


def _spans(run_folder: Path, name: str) -> Iterator[tuple[float, float]]:
    for event in read_events(run_folder / "events" / "learner-0.jsonl"):
        if event["event"] == name and event["phase"] == "end":
            yield event["time"] - event["seconds"], event["time"]


def _starts(run_folder: Path, role: str) -> list[int]:
    """The process ids with which a role was started."""
    events = read_events(run_folder / "events" / f"{role}.jsonl")
    return [event["pid"] for event in events if event["event"] == "process.start"]

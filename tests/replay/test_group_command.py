"""`streamrl group RUN ID`: one group's life, from what a real service has recorded."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from service_parts import V1, WAIT, Clock, MakeGroup, Running, answer, receive_tickets
from test_service_leases import beat_until_tickets

from streamrl import cli
from streamrl.config import file as config_file
from streamrl.stream.messages import Applied, Credit, Next, Quarantined, Refused, Saved
from streamrl.stream.sockets import ReceivedBatch

Start = Callable[..., Running]


def wait_for(running: Running, event: str, version: str | None = None) -> None:
    deadline = time.monotonic() + WAIT
    while version not in [record.get("version") for record in running.events_of(event)]:
        assert time.monotonic() < deadline, event
        time.sleep(0.01)


@pytest.fixture
def run(start: Start, make_group: MakeGroup, tmp_path: Path) -> Path:
    """Group 0: lost with its worker, refused too late, answered by another, quarantined in step 0, in a checkpoint."""
    clock = Clock()
    running = start(clock, run={"steps": 9}, replay={"lease": 1.0}, journal={"commit_seconds": 0.0})
    config_file.save(running.config, tmp_path / "config.yaml")
    lost, heir = running.worker("lost", capacity=4), running.worker("heir", capacity=0)
    learner = running.learner()
    first = receive_tickets(lost, 4)
    lost.send(Credit(capacity=0))
    heir.send(Credit(capacity=4))
    again = beat_until_tickets(clock, heir, 4)
    assert isinstance(answer(lost, make_group, first[0]), Refused)
    for ticket in again:
        answer(heir, make_group, ticket)
    learner.send(Next(step=0))
    assert isinstance(learner.receive(WAIT), ReceivedBatch)
    learner.send(Quarantined(step=0, group_id=0, attempt=1, reason="it fails"))
    running.announce(V1)
    heir.send(Applied(server="heir-server", version=V1))
    wait_for(running, "publish.acknowledged", "1.0")
    learner.send(Saved(version=V1, oldest=0))
    wait_for(running, "learner.saved", "1.0")
    (tmp_path / "checkpoints" / "step_1").mkdir(parents=True)
    running.close()
    return tmp_path


def test_the_whole_life_of_a_group_is_on_one_screen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["group", str(run), "0"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24
    head, *lines = shown.splitlines()
    assert head == f"group 0 of {run}: copy prompt 0, quarantined, step 0"
    expected = [
        "tickets               attempt 0  lost, which must have step 0 or newer",
        "ticket.expired        attempt 0  lost: its lease is over",
        "tickets               attempt 1  heir, which must have step 0 or newer",
        "group.refused         attempt 0  lost: group 0 attempt 0: attempt 1 is issued",
        "group.accepted        attempt 1  heir: 2 answers, 10 tokens, pass rate ",
        "batch                            step 0",
        "group.quarantined     attempt 1  it fails",
        "publish.acknowledged             a server has version 1.0: its slot is free",
        "learner.saved                    checkpoint of version 1.0, the first that contains it",
        "checkpoints that contain it: step_1",
    ]
    assert len(lines) == len(expected)
    for line, text in zip(lines, expected, strict=True):
        assert text in line


def test_the_same_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["group", str(run), "1", "--json"]) == 0
    life = json.loads(capsys.readouterr().out)
    assert (life["group_id"], life["phase"], life["step"], life["checkpoints"]) == (1, "consumed", 0, ["step_1"])
    tickets = [
        (event["attempt"], event["worker"], event["required"]) for event in life["events"] if "required" in event
    ]
    assert tickets == [(0, "lost", 0), (1, "heir", 0)]


def test_a_ticket_that_is_out_at_a_restart_of_the_service_is_nobodys_and_adopted(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = start()
    config_file.save(running.config, tmp_path / "config.yaml")
    worker = running.worker()
    running.learner()
    (*_, ticket) = receive_tickets(worker, 4)
    running.close()
    following = start()
    following.worker(tickets=((ticket.group_id, 0),))
    wait_for(following, "ticket.adopted")
    assert cli.main(["group", str(tmp_path), str(ticket.group_id)]) == 0
    shown = capsys.readouterr().out
    assert f"group {ticket.group_id} of {tmp_path}: copy prompt {ticket.prompt_index}, issued" in shown
    assert "the replay service was started again" in shown
    assert "w named it after a restart" in shown


def test_an_unknown_run_or_group_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["group", str(run), "99"]) == 2
    assert capsys.readouterr().err == f"streamrl: {run}: no group 99; allowed: 0 to 5\n"
    assert cli.main(["group", str(run / "none"), "0"]) == 2
    assert "no run folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["group", str(run), "first"])
    assert len(capsys.readouterr().err.splitlines()) == 1

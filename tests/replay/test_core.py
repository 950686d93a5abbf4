"""A whole run in the service's core: peers are lists in memory, and time is a number."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest
from driven_core import LEARNER, PUBLISHER, SERVER, WORKER, Driven, answer, issued
from service_parts import RUN, V0, MakeGroup, make_config

from streamrl.replay.core import Core
from streamrl.replay.peers import ASK_AGAIN
from streamrl.stream.messages import (
    Accepted,
    Announce,
    Applied,
    BatchHeader,
    Buffer,
    Bye,
    Credit,
    Exited,
    Finished,
    GaveUp,
    Heartbeat,
    Hello,
    Introduce,
    Message,
    Next,
    Progress,
    Publish,
    PublishFailed,
    Roster,
    Stop,
    Tickets,
    Welcome,
    encode,
)
from streamrl.stream.sockets import Received
from streamrl.types import PolicyVersion
from tests.operations_table import documented

PARTS = ("core", "phases", "run_parts", "generator_side", "learner_side", "publisher_side", "peer_time", "workers")


@pytest.fixture
def driven(tmp_path: Path) -> Driven:
    """A learner that was welcomed, a publisher, and a worker with one server and credit for all slots."""
    driven = Driven(tmp_path)
    driven.send(LEARNER, Hello(run=RUN, role="learner", name="learner-0", version=V0))
    driven.send(PUBLISHER, Hello(run=RUN, role="publisher", name="publisher-0", version=V0))
    driven.send(WORKER, Hello(run=RUN, role="generator", name="w", servers=(SERVER,)), Credit(capacity=99))
    assert [type(message) for message in driven.got(LEARNER)] == [Welcome]
    return driven


def test_a_run_from_the_first_hello_to_the_last_bye(driven: Driven, make_group: MakeGroup) -> None:
    assert driven.got(PUBLISHER)[-1] == Roster(servers=(SERVER,))
    for step in range(3):
        tickets = issued(driven)
        driven.send(LEARNER, Next(step=step))
        answer(driven, make_group, tickets)
        accepted = [message for message in driven.got(WORKER) if isinstance(message, Accepted)]
        assert [message.group_id for message in accepted] == [ticket.group_id for ticket in tickets]
        assert [group.group_id for group in driven.batch().groups] == [2 * step, 2 * step + 1]
        version = PolicyVersion(step + 1)
        driven.send(LEARNER, Progress(version=version))
        driven.send(PUBLISHER, Announce(version=version), Publish(server="s", version=version, manifest={}))
        assert any(isinstance(message, Publish) for message, _ in driven.sent[WORKER])
        if step < 2:
            driven.send(WORKER, Applied(server="s", version=version))
    driven.send(LEARNER, Finished(version=PolicyVersion(3)))
    driven.tick(1.0)
    assert not any(isinstance(message, Stop) for message in driven.got(LEARNER)), "the last version is not out"
    driven.send(WORKER, Applied(server="s", version=PolicyVersion(3)))
    for peer in (LEARNER, PUBLISHER, WORKER):
        assert Stop(reason="the run is complete with version 3.0", failed=False) in driven.got(peer)
    assert not driven.core.is_over()
    driven.send(WORKER, Bye())
    assert driven.core.is_over()
    assert driven.core.code == 0


def test_leases_and_silence_pass_in_simulated_time(driven: Driven) -> None:
    before = issued(driven)
    for _ in range(45):  # replay.lease is 30 s, and nothing is received
        driven.tick(1.0)
    assert [event["worker"] for event in driven.events_of("worker.silent")] == ["w"]
    driven.send(WORKER, Heartbeat(busy=0.0, tickets=()))
    again = issued(driven)
    assert [(ticket.group_id, ticket.attempt) for ticket in again] == [(t.group_id, t.attempt + 1) for t in before]


def test_a_ticket_that_could_not_be_sent_is_no_attempt(
    driven: Driven, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven.send(WORKER, Bye())
    driven.got(WORKER)
    sent = driven.core._run._send

    def deaf(peer: bytes, message: Message, frames: Sequence[Buffer]) -> bool:
        return not isinstance(message, Tickets) and sent(peer, message, frames)

    with monkeypatch.context() as patched:
        patched.setattr(driven.core._run, "_send", deaf)
        driven.send(WORKER, Hello(run=RUN, role="generator", name="w", servers=(SERVER,)), Credit(capacity=99))
        for _ in range(5):  # replay.max_attempts is 3
            driven.send(WORKER, Heartbeat())
            driven.tick()
    driven.send(WORKER, Heartbeat())
    tickets = issued(driven)
    assert [ticket.group_id for ticket in tickets] == [0, 1, 2, 3]
    assert driven.events_of("group.placeholders") == []
    assert {event["reason"] for event in driven.events_of("ticket.lost")[4:]} == {"its worker cannot be reached"}
    answer(driven, make_group, tickets)
    assert len([message for message in driven.got(WORKER) if isinstance(message, Accepted)]) == 4


def test_a_last_version_that_does_not_arrive_is_waited_for_until_publish_timeout(driven: Driven) -> None:
    driven.send(LEARNER, Finished(version=PolicyVersion(3)))
    for seconds in range(5):
        assert not driven.events_of("replay.stop"), seconds
        driven.send(WORKER, Heartbeat(busy=0.0, tickets=()))
        driven.tick(1.0)
    assert driven.events_of("replay.stop")[0]["code"] == 0
    assert not driven.events_of("publish.complete")
    for _ in range(5):  # run.stop_timeout: nobody says Bye
        assert not driven.core.is_over()
        driven.tick(1.0)
    assert driven.core.is_over()


def test_a_learner_that_exits_ends_the_run_in_good_order(driven: Driven) -> None:
    driven.send(LEARNER, Exited(version=PolicyVersion(2), reason="the night is over"))
    for peer in (LEARNER, PUBLISHER, WORKER):
        assert driven.got(peer)[-1] == Stop(reason="the night is over", failed=False)
    assert driven.events_of("learner.exited")[0]["reason"] == "the night is over"
    driven.send(LEARNER, Exited(version=PolicyVersion(2), reason="again"))
    driven.send(WORKER, Bye())
    assert driven.core.is_over()
    assert (driven.core.code, len(driven.events_of("learner.exited"))) == (0, 1)


def test_the_end_of_a_run_reaches_a_peer_whose_connection_comes_back(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = driven.core._run._send

    def broken(peer: bytes, message: Message, frames: Sequence[Buffer]) -> bool:
        return peer != WORKER and sent(peer, message, frames)

    with monkeypatch.context() as patched:
        patched.setattr(driven.core._run, "_send", broken)
        driven.send(LEARNER, Exited(version=V0, reason="run.exit_interval"))
        driven.tick(1.0)
    assert not any(isinstance(message, Stop) for message in driven.got(WORKER))
    for _ in range(3):
        driven.tick(0.1)
    for peer in (WORKER, LEARNER):
        stops = [message for message in driven.got(peer) if isinstance(message, Stop)]
        assert stops == [Stop(reason="run.exit_interval")]


def test_a_role_that_gives_up_ends_the_run_at_once(driven: Driven) -> None:
    driven.send(WORKER, GaveUp(reason="no device"))
    assert driven.got(LEARNER)[-1] == Stop(reason="no device", failed=True)
    assert issued(driven)
    driven.durable.buffer.release("w")
    driven.tick()
    assert issued(driven) == [], "tickets of a run that is over"
    assert driven.core.is_over()
    assert driven.core.code == 1


def test_a_role_that_gives_up_while_a_run_stops_in_good_order_does_not_fail_it(driven: Driven) -> None:
    driven.send(LEARNER, Exited(version=V0, reason="run.exit_interval"))
    driven.tick()
    driven.send(WORKER, GaveUp(reason="no device"))
    driven.tick()
    stops = [message for message in driven.got(LEARNER) if isinstance(message, Stop)]
    assert (stops, driven.core.code) == ([Stop(reason="run.exit_interval")], 0)


def test_who_comes_too_late_is_told_what_became_of_the_run(driven: Driven) -> None:
    driven.send(WORKER, GaveUp(reason="no device"))
    driven.send(b"w:2", Hello(run=RUN, role="generator", name="w2", servers=(SERVER,)))
    driven.send(b"stranger", Heartbeat(busy=0.0, tickets=()))
    over = Stop(reason="the run is over", failed=True)
    assert (driven.got(b"w:2"), driven.got(b"stranger")) == ([over], [over])


def test_a_run_without_a_step_is_given_up_after_progress_timeout(driven: Driven) -> None:
    for _ in range(4000):
        if driven.core.is_over():
            break
        driven.send(WORKER, Heartbeat(busy=0.0, tickets=()))
        driven.tick(1.0)
    assert driven.core.code == 1
    assert "no learner step in run.progress_timeout=" in driven.events_of("gave_up")[0]["reason"]


def test_a_run_on_a_full_disk_waits_and_is_given_up_after_progress_timeout(driven: Driven) -> None:
    driven.durable.full = True
    for _ in range(4000):
        if driven.core.is_over():
            break
        driven.send(WORKER, Heartbeat(busy=0.0, tickets=()))
        driven.tick(1.0)
    documented(
        "no learner step in run.progress_timeout=... s: the disk of the run folder is full",
        driven.events_of("gave_up")[0]["reason"],
        driven.core.code,
    )


def test_what_was_lost_is_asked_for(driven: Driven) -> None:
    missed = Received(PUBLISHER, [memoryview(encode(Heartbeat(busy=0.0, tickets=())))], 2)
    driven.core.handle(missed, driven.now)
    assert driven.got(PUBLISHER)[-1] == Introduce()
    driven.send(WORKER, Bye())
    driven.send(PUBLISHER, Publish(server="s", version=PolicyVersion(1), manifest={}, attempt=7))
    failed = [message for message in driven.got(PUBLISHER) if isinstance(message, PublishFailed)]
    assert [(message.server, message.attempt) for message in failed] == [("s", 7)]


def test_who_was_asked_is_asked_until_it_says_hello(driven: Driven) -> None:
    driven.core.handle(Received(PUBLISHER, [memoryview(encode(Heartbeat()))], 1), driven.now)
    assert driven.got(PUBLISHER)[-1] == Introduce()  # and it is lost, or what is said to it is
    for _ in range(2):
        driven.send(PUBLISHER, Heartbeat())
        assert driven.got(PUBLISHER) == [], "asked again at once"
        driven.tick(ASK_AGAIN)
        driven.send(PUBLISHER, Heartbeat())
        assert driven.got(PUBLISHER) == [Introduce()]
    driven.send(PUBLISHER, Hello(run=RUN, role="publisher", name="publisher-0", version=V0))
    assert Introduce() not in driven.got(PUBLISHER)
    driven.tick(ASK_AGAIN)
    driven.send(PUBLISHER, Heartbeat())
    assert driven.got(PUBLISHER) == []


def test_a_core_in_memory_takes_decoded_messages_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_group: MakeGroup
) -> None:
    monkeypatch.chdir(tmp_path)
    sent: list[tuple[bytes, Message, Sequence[Buffer]]] = []

    def send(peer: bytes, message: Message, frames: Sequence[Buffer]) -> bool:
        sent.append((peer, message, frames))
        return True

    core = Core.in_memory(make_config(journal={"keep": "all"}), send)
    core.handle_message(LEARNER, Hello(run=core.run_id, role="learner", name="learner-0", version=V0), 0.0)
    core.handle_message(WORKER, Hello(run=core.run_id, role="generator", name="w", servers=(SERVER,)), 0.0)
    core.handle_message(WORKER, Credit(capacity=2), 0.0)
    core.handle_message(LEARNER, Next(step=0), 0.0)
    core.tick(0.0, emptied=True)
    (tickets,) = [message.tickets for _, message, _ in sent if isinstance(message, Tickets)]
    for ticket in tickets:
        group = make_group(ticket.group_id, attempt=ticket.attempt, version=ticket.issued_version)
        core.handle_group(WORKER, group, (b"%d" % ticket.group_id,))
    core.tick(0.1, emptied=True)
    assert [list(frames) for _, message, frames in sent if isinstance(message, BatchHeader)] == [[b"0", b"1"]]
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("part", PARTS)
def test_the_core_has_no_clock_no_socket_no_thread_and_no_file(part: str) -> None:
    tree = ast.parse(Path("streamrl/replay", f"{part}.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert not imported & {"time", "zmq", "socket", "threading", "signal", "pathlib", "os"}

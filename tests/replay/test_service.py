"""The service over real sockets: tickets, groups, batches, notices, losses, malformed peers, every way to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest
import zmq

from streamrl.config import Config
from streamrl.observe.events import EventLog
from streamrl.replay.journal import recorded_batches
from streamrl.replay.service import Service
from streamrl.stream.address import replay_address
from streamrl.stream.codec import encode_group
from streamrl.stream.messages import (
    Accepted,
    Announce,
    Applied,
    Bye,
    Credit,
    Finished,
    Heartbeat,
    Hello,
    Message,
    Next,
    Progress,
    Publish,
    PublishFailed,
    Refused,
    Roster,
    ServerState,
    Stop,
    Tickets,
    encode,
)
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import Group, PolicyVersion, Ticket

WAIT = 20.0  # seconds for anything that must come; nothing waits as long when all is well
V0, V1 = PolicyVersion(0), PolicyVersion(1)
MakeGroup = Callable[..., Group]
M = TypeVar("M")


def make_config(**sections: dict[str, Any]) -> Config:
    """Steps of two groups, staleness 1: four slots."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"steps": 3, "stop_timeout": 5.0, "start_timeout": 20.0},
        "generate": {"heartbeat": 1.0},
        "replay": {"groups_per_step": 2, "max_staleness": 1},
        "publish": {"timeout": 5.0},
    }
    for name, fields in sections.items():
        tree.setdefault(name, {}).update(fields)
    return Config.model_validate(tree)


class Running:
    """A service in a thread."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.events = EventLog(folder / "events" / "replay-0.jsonl", "replay-0")
        self.service = Service(config, folder, self.events)
        self.codes: list[int] = []
        self.thread = threading.Thread(target=lambda: self.codes.append(self.service.run()))
        self.thread.start()
        self.peers: list[Dealer] = []

    def peer(self, hello: Hello) -> Dealer:
        dealer = Dealer(self.service.address, self.config.stream, hello.name)
        self.peers.append(dealer)
        dealer.send(hello)
        return dealer

    def worker(self, name: str = "w", capacity: int = 99, version: PolicyVersion = V0) -> Dealer:
        server = ServerState(name=f"{name}-server", version=version)
        dealer = self.peer(Hello(role="generator", name=name, servers=(server,)))
        dealer.send(Credit(capacity=capacity))
        return dealer

    def learner(self, version: PolicyVersion = V0) -> Dealer:
        return self.peer(Hello(role="learner", name="learner-0", version=version))

    def publisher(self) -> Dealer:
        return self.peer(Hello(role="publisher", name="publisher-0", version=V0))

    def told(self, event: str) -> list[dict[str, Any]]:
        lines = self.events.path.read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["event"] == event]

    def end(self) -> int:
        self.thread.join(WAIT)
        assert not self.thread.is_alive()
        return self.codes[0]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def make(**sections: dict[str, Any]) -> Running:
        started.append(Running(make_config(**sections), tmp_path))
        return started[-1]

    yield make
    for running in started:
        running.service.interrupt("the end of the test", 0)
        running.thread.join(WAIT)
        running.events.close()
        for peer in running.peers:
            peer.close()


def hear(dealer: Dealer, kind: type[M]) -> M:
    """The next message, which must be of this kind."""
    message = dealer.receive(WAIT)
    assert isinstance(message, kind), message
    return message


def hear_tickets(dealer: Dealer, count: int) -> list[Ticket]:
    tickets: list[Ticket] = []
    while len(tickets) < count:
        tickets += hear(dealer, Tickets).tickets
    assert len(tickets) == count
    return tickets


def answer(dealer: Dealer, make_group: MakeGroup, ticket: Ticket, version: PolicyVersion | None = None) -> Message:
    version = version or ticket.issued_version
    dealer.send_group(make_group(ticket.group_id, attempt=ticket.attempt, version=version))
    while isinstance(message := dealer.receive(WAIT), Tickets):  # a Publish or more tickets may come between
        pass
    assert isinstance(message, Accepted | Refused), message
    return message


def ids(received: ReceivedBatch) -> list[int]:
    return [group.group_id for group in received.batch.groups]


def test_a_whole_run_with_two_workers_a_learner_and_a_publisher(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    """Three steps of two groups; the groups come in the wrong order, each version is published to both servers."""
    running = start()
    workers = {name: running.worker(name, capacity=2) for name in ("a", "b")}
    learner, publisher = running.learner(), running.publisher()
    version = V0
    for step in range(3):
        learner.send(Next(step=step))
        batch = None
        while batch is None:
            for worker in workers.values():
                while isinstance(message := worker.receive(0.02), Tickets | Accepted):
                    tickets = message.tickets if isinstance(message, Tickets) else ()
                    for ticket in reversed(tickets):
                        worker.send_group(make_group(ticket.group_id, version=ticket.issued_version, tokens=10))
                assert message is None, message
            batch = learner.receive(0.02)
        assert isinstance(batch, ReceivedBatch)
        assert (batch.batch.step, ids(batch)) == (step, [2 * step, 2 * step + 1])
        version = replace(version, step=step + 1)
        learner.send(Progress(version=version))
        publisher.send(Announce(version=version))
        for name, worker in workers.items():
            publisher.send(Publish(server=f"{name}-server", version=version, manifest={"step": step}))
            while not isinstance(message := worker.receive(WAIT), Publish):
                for ticket in message.tickets if isinstance(message, Tickets) else ():
                    worker.send_group(make_group(ticket.group_id, version=ticket.issued_version, tokens=10))
            assert (message.version, message.manifest) == (version, {"step": step})
            worker.send(Applied(server=message.server, version=version))
            while not isinstance(publisher.receive(WAIT), Applied):
                pass
    learner.send(Finished(version=version))
    for peer in (*workers.values(), learner, publisher):
        while not isinstance(message := peer.receive(WAIT), Stop):
            assert message is not None
        assert "complete with version 3.0" in message.reason
        peer.send(Bye())
    assert running.end() == 0
    recorded = list(recorded_batches(running.folder / "journal"))
    assert [(batch.step, [group.group_id for group in batch.groups]) for batch in recorded] == [
        (0, [0, 1]),
        (1, [2, 3]),
        (2, [4, 5]),
    ]
    assert [event["tokens"] for event in running.told("group.accepted")] == [20] * 6
    assert not (running.folder / "replay.address").exists()


def test_nothing_is_issued_beyond_the_slots_until_a_server_has_the_weights(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker, learner = running.worker(), running.learner()
    for ticket in hear_tickets(worker, 4):
        answer(worker, make_group, ticket)
    learner.send(Next(step=0))
    received = hear(learner, ReceivedBatch)
    assert received.stats == {
        "tokens_generated": 40,
        "generator_busy": 0.0,
        "groups": 2,
        "bytes": received.stats["bytes"],
    }
    assert worker.receive(0.3) is None  # consumed, and still charged
    worker.send(Applied(server="w-server", version=V1))
    assert [(t.group_id, t.issued_version) for t in hear_tickets(worker, 2)] == [(4, V1), (5, V1)]


def test_the_same_step_may_be_asked_for_again_and_a_wrong_one_ends_the_run(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker, learner = running.worker(), running.learner()
    for ticket in hear_tickets(worker, 4):
        answer(worker, make_group, ticket)
    for _ in range(2):
        learner.send(Next(step=0))
        assert ids(hear(learner, ReceivedBatch)) == [0, 1]
    learner = running.learner()  # after a reconnect
    learner.send(Next(step=0))
    assert ids(hear(learner, ReceivedBatch)) == [0, 1]
    assert len(running.told("batch")) == 1
    learner.send(Next(step=2))
    assert "step 2 was asked for, 1 is next" in hear(learner, Stop).reason
    assert running.end() == 1


def test_a_silent_workers_tickets_go_to_another_and_its_late_groups_are_refused(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(generate={"heartbeat": 0.2})
    lost, heir = running.worker("lost"), running.worker("heir", capacity=0)
    running.learner()
    tickets = hear_tickets(lost, 4)
    heir.send(Credit(capacity=4))
    again: list[Ticket] = []
    while len(again) < 4:
        heir.send(Heartbeat())
        message = heir.receive(0.05)
        again += message.tickets if isinstance(message, Tickets) else ()
    assert [(t.group_id, t.attempt) for t in again] == [(t.group_id, 1) for t in tickets]
    late = answer(lost, make_group, tickets[0])
    assert isinstance(late, Refused)
    assert late.reason == "group 0 attempt 0: attempt 1 is issued"
    assert isinstance(answer(heir, make_group, again[0]), Accepted)


def test_a_ticket_past_its_deadline_is_issued_again_and_the_last_attempt_ends_the_run(
    start: Callable[..., Running],
) -> None:
    running = start(replay={"group_timeout": 0.4, "max_attempts": 2}, generate={"heartbeat": 9.0})
    worker = running.worker(capacity=1)
    learner = running.learner()
    assert [(t.group_id, t.attempt) for t in hear_tickets(worker, 1)] == [(0, 0)]
    assert [(t.group_id, t.attempt) for t in hear_tickets(worker, 1)] == [(0, 1)]
    for peer in (worker, learner):
        assert "group 0 was lost 2 times" in hear(peer, Stop).reason
    assert running.end() == 1


def test_a_worker_that_says_bye_or_comes_back_as_a_new_process_loses_its_tickets_at_once(
    start: Callable[..., Running],
) -> None:
    running = start()
    first = running.worker("w")
    running.learner()
    hear_tickets(first, 4)
    second = running.worker("w")
    assert [t.attempt for t in hear_tickets(second, 4)] == [1] * 4
    second.send(Bye())
    third = running.worker("other")
    assert [t.attempt for t in hear_tickets(third, 4)] == [2] * 4


def test_a_group_with_bad_content_costs_its_attempt_not_the_service(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker = running.worker(capacity=1)
    running.learner()
    (ticket,) = hear_tickets(worker, 1)
    header, arena = encode_group(make_group(ticket.group_id), 1 << 20)
    worker._send([header, bytes(arena)[:-4]])
    refused = hear(worker, Refused)
    assert (refused.group_id, refused.attempt) == (0, 0)
    assert "arena of 104 bytes, the header asks for 108" in refused.reason
    (again,) = hear_tickets(worker, 1)
    assert (again.group_id, again.attempt) == (0, 1)
    assert isinstance(answer(worker, make_group, again), Accepted)


def test_malformed_messages_are_refused_counted_and_told_once_a_peer(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker, learner = running.worker(), running.learner()
    ticket = hear_tickets(worker, 4)[0]
    junk: list[list[bytes]] = [
        [b"", b"", b""],
        [b"junk"],
        [b"\xdd\xff\xff\xff\xff"],
        [encode(Next(step=0))],  # not a worker's to say
        [encode(Heartbeat())[:-1]],
        [encode(Applied(server="nobody", version=V0))],
        [b"junk", b"junk"],
        [os.urandom(300), os.urandom(300)],
    ]
    for frames in junk:
        worker._send(frames)
        learner._send(frames)
    stranger = Dealer(running.service.address, running.config.stream, "stranger")
    stranger.send(Credit(capacity=1))
    assert hear(stranger, Stop).reason == "refused: Credit before a Hello"
    stranger.close()
    assert isinstance(answer(worker, make_group, ticket), Accepted)
    assert running.service.malformed == 2 * len(junk)  # and the stranger, less the learner's rightful Next
    assert len(running.told("replay.malformed")) == 3


def test_damaged_messages_of_every_kind_leave_the_service_serving(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker, fuzzer, learner = running.worker(), running.worker("fuzzer", capacity=0), running.learner()
    tickets = hear_tickets(worker, 4)
    random = Random(7)
    whole = [
        [encode(Heartbeat(tickets=((0, 0),), busy=1.0, generated=3))],
        [encode(Applied(server="fuzzer-server", version=V0))],
        [encode(Credit(capacity=0))],
        list(encode_group(make_group(0), 1 << 20)),
    ]
    for _ in range(400):
        frames = [bytearray(frame) for frame in random.choice(whole)]
        for _ in range(random.randint(1, 5)):
            frame = random.choice(frames)
            frame[random.randrange(len(frame))] = random.randrange(256)
        fuzzer._send([bytes(frame)[: random.choice([None, random.randrange(99)])] for frame in frames])
    for ticket in tickets:
        assert isinstance(answer(worker, make_group, ticket), Accepted)
    learner.send(Next(step=0))
    assert ids(hear(learner, ReceivedBatch)) == [0, 1]
    assert running.service.malformed > 100


def test_the_publisher_knows_the_servers_and_hears_what_became_of_its_versions(start: Callable[..., Running]) -> None:
    running = start()
    publisher = running.publisher()
    assert hear(publisher, Roster).servers == ()
    worker = running.worker()
    assert hear(publisher, Roster).servers == (ServerState(name="w-server", version=V0),)
    publisher.send(Publish(server="w-server", version=V1, manifest={"n": [1]}))
    assert hear(worker, Publish).manifest == {"n": [1]}
    worker.send(PublishFailed(server="w-server", version=V1, reason="no memory"))
    assert hear(publisher, PublishFailed).reason == "no memory"
    running.learner()
    assert worker.receive(0.3) is None  # no tickets for a server in an unknown state
    worker.send(Applied(server="w-server", version=V1))
    assert hear(publisher, Applied).version == V1
    assert hear(publisher, Roster).servers == (ServerState(name="w-server", version=V1),)
    assert hear_tickets(worker, 4)[0].issued_version == V0
    publisher.send(Publish(server="gone", version=V1, manifest={}))
    assert hear(publisher, PublishFailed).reason == "no live worker owns this server"
    worker.send(Bye())
    assert hear(publisher, Roster).servers == ()


def test_a_resumed_run_issues_nothing_before_its_weights_are_back(start: Callable[..., Running]) -> None:
    running = start(run={"steps": 30})
    restored = PolicyVersion(20, incarnation=1)
    worker = running.worker(version=PolicyVersion(25))  # a server that outlived the learner
    running.learner(restored)
    assert worker.receive(0.3) is None
    worker.send(Applied(server="w-server", version=restored))
    tickets = hear_tickets(worker, 4)
    assert [t.group_id for t in tickets] == [40, 41, 42, 43]
    assert {t.issued_version for t in tickets} == {restored}
    other = running.learner(PolicyVersion(21, incarnation=2))
    assert "tickets began at version 20.1" in hear(other, Stop).reason


def test_the_end_waits_for_the_last_version_but_not_for_ever(start: Callable[..., Running]) -> None:
    running = start(publish={"timeout": 0.5}, run={"stop_timeout": 0.5})
    worker, learner = running.worker(), running.learner()
    hear_tickets(worker, 4)
    learner.send(Finished(version=PolicyVersion(3)))
    assert "complete" in hear(worker, Stop).reason  # after publish.timeout; it never applied version 3
    assert "complete" in hear(learner, Stop).reason
    assert running.end() == 0  # after run.stop_timeout; it never said Bye


def test_the_role_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    """As its own process, by its entry point."""
    script = (
        "import sys; from pathlib import Path; from streamrl.config import Config;"
        "from streamrl.replay.service import main;"
        "sys.exit(main(Config.model_validate_json(sys.argv[1]), Path(sys.argv[2])))"
    )
    config = make_config()
    process = subprocess.Popen([sys.executable, "-c", script, config.model_dump_json(), str(tmp_path)])
    try:
        address = replay_address(config, tmp_path)
        learner = Dealer(address, config.stream, "learner-0")
        learner.send(Hello(role="learner", name="learner-0", version=V0))
        worker = Dealer(address, config.stream, "w")
        worker.send(Hello(role="generator", name="w", servers=(ServerState(name="s", version=V0),)))
        worker.send(Credit(capacity=1))
        hear_tickets(worker, 1)
        process.send_signal(signal.SIGTERM)
        for peer in (learner, worker):
            assert "ended by SIGTERM" in hear(peer, Stop).reason
            peer.close()
        assert process.wait(WAIT) == 0
        assert not (tmp_path / "replay.address").exists()
    finally:
        process.kill()
        process.wait(WAIT)


def test_an_address_in_use_is_told_before_anything_is_started(start: Callable[..., Running]) -> None:
    running = start()
    config = make_config(replay={"address": running.service.address})
    with pytest.raises(zmq.ZMQError, match=r"replay\.address tcp://127\.0\.0\.1:\d+: Address already in use"):
        Service(config, running.folder, running.events)

"""The service is killed, its disk runs full, its learner starts again: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import zmq
from msgspec.structs import replace
from service_parts import (
    RUN,
    V0,
    V1,
    WAIT,
    Clock,
    MakeGroup,
    Running,
    ServiceProcess,
    answer,
    ids,
    receive,
    receive_tickets,
)

from streamrl.config import Config
from streamrl.generate.link import ServiceLink
from streamrl.observe.events import EventLog
from streamrl.replay import journal
from streamrl.replay.journal import recorded_batches
from streamrl.stream.address import replay_address
from streamrl.stream.codec import encode_group
from streamrl.stream.messages import (
    Accepted,
    Applied,
    Credit,
    Heartbeat,
    Hello,
    Introduce,
    Lost,
    Message,
    Next,
    PublishFailed,
    Roster,
    Saved,
    ServerState,
    Tickets,
    Welcome,
)
from streamrl.stream.peer import Peer
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import Batch, Group, Ledger, PolicyVersion

STEPS = 30


class ScriptedWorker:
    """The real protocol of a worker in a thread; its server answers at once, with whatever version is published."""

    def __init__(self, config: Config, folder: Path, name: str, make_group: MakeGroup, published: list[int]) -> None:
        self._config, self._folder, self._name = config, folder, name
        self._make_group = make_group
        self._published = published  # step of the newest version, its last entry
        self._applied = V0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()

    async def _run(self) -> None:
        events = EventLog(self._folder / "events" / f"{self._name}.jsonl", self._name)
        address = replay_address(self._config, self._folder)
        link = ServiceLink(
            self._config, self._folder, self._name, address=address, servers=lambda: (self._state,), events=events
        )
        await link.greet()
        tasks = [asyncio.create_task(work) for work in (link.deliver(), self._beat(link), self._listen(link))]
        while not self.ended.is_set():
            await asyncio.sleep(0.02)
            for task in tasks:
                assert not task.done(), task.exception()
        for task in tasks:
            task.cancel()
        link.close()
        events.close()

    @property
    def _state(self) -> ServerState:
        return ServerState(name=f"{self._name}-server", version=self._applied)

    async def _beat(self, link: ServiceLink) -> None:
        while True:
            await link.beat(0.0, 0)
            if self._published[-1] > self._applied.step:
                self._applied = PolicyVersion(self._published[-1])
                await link.greet()  # there is no publisher to announce a version: it comes with it
            await asyncio.sleep(0.02)

    async def _listen(self, link: ServiceLink) -> None:
        random = Random(self._name)
        while True:
            message = await link.receive()
            tickets = message.tickets if isinstance(message, Tickets) else ()
            for ticket in random.sample(tickets, len(tickets)):
                assert self._applied.step >= ticket.issued_version.step
                if link.open(ticket):
                    group = self._make_group(ticket.group_id, attempt=ticket.attempt, version=self._applied)
                    link.finish(replace(group, prompt_index=ticket.prompt_index, finished=random.random()))


@dataclass
class Trainer:
    """A learner that trains nothing, and remembers what each step was made of."""

    config: Config
    folder: Path
    published: list[int]
    step: int = 0
    ledger: Ledger | None = None
    trained: dict[int, Batch] = field(default_factory=dict)
    redelivered: int = 0

    def run(self, until: int, between: Callable[[], None]) -> None:
        """From `step` on, as a process that has just restored its checkpoint."""
        version = PolicyVersion(self.step, incarnation=self.redelivered)
        peer = Peer(self.config, self.folder, "learner", lambda: self._opening(version))
        try:
            while self.step < until:
                received = peer.receive(0.1)
                peer.beat()
                if isinstance(received, ReceivedBatch) and received.batch.step == self.step:
                    self._train(received)
                    peer.send(Next(step=self.step))
                    between()
        finally:
            peer.close()

    def _opening(self, version: PolicyVersion) -> Iterator[Message]:
        yield Hello(
            run=RUN, role="learner", name="learner-0", version=replace(version, step=self.step), ledger=self.ledger
        )
        yield Next(step=self.step)

    def _train(self, received: ReceivedBatch) -> None:
        batch = received.batch
        if (before := self.trained.get(batch.step)) is not None:
            self.redelivered += 1
            assert [_content(group) for group in batch.groups] == [_content(group) for group in before.groups]
        self.trained[batch.step] = batch
        self.step, self.ledger = batch.step + 1, received.ledger
        self.published.append(max(self.step, self.published[-1]))


def _content(group: Group) -> tuple[object, ...]:
    return group.group_id, group.attempt, group.finished, group.worker


@pytest.fixture
def start_worker(make_group: MakeGroup) -> Iterator[Callable[..., ScriptedWorker]]:
    started: list[ScriptedWorker] = []

    def start(service: ServiceProcess, name: str, published: list[int]) -> ScriptedWorker:
        started.append(ScriptedWorker(service.config, service.folder, name, make_group, published))
        return started[-1]

    yield start
    for worker in started:
        worker.ended.set()
    for worker in started:
        worker.thread.join(WAIT)


@pytest.mark.parametrize("most", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_service_killed_at_random_loses_nothing_and_repeats_nothing(
    start_process: Callable[..., ServiceProcess], start_worker: Callable[..., ScriptedWorker], most: int
) -> None:
    """Two workers by the real protocol, a learner that also falls back to a checkpoint, several kills."""
    service = start_process(
        run={"steps": STEPS},
        generate={"heartbeat": 0.1},
        replay={"groups_per_step": 4, "max_staleness": 2, "lease": 2.0},
        learner={"tick": 0.1},
        journal={"segment": 1 << 14},
    )
    published = [0]
    for name in ("a", "b"):
        start_worker(service, name, published)
    trainer = Trainer(service.config, service.folder, published)
    random = Random(5)
    checkpoint: tuple[int, Ledger | None] = (0, None)
    kills = 0

    def between() -> None:
        nonlocal kills
        if random.random() < 0.25 and kills < most:
            kills += 1
            service.kill()
            service.start()

    while trainer.step < STEPS:
        trainer.run(min(STEPS, trainer.step + random.randint(1, 6)), between)
        if trainer.step < STEPS and random.random() < 0.5:
            trainer.step, trainer.ledger = checkpoint  # it was killed too
        else:
            checkpoint = (trainer.step, trainer.ledger)
    assert kills == most
    assert trainer.redelivered > 0
    assert [[group.group_id for group in trainer.trained[step].groups] for step in range(STEPS)] == [
        list(range(4 * step, 4 * step + 4)) for step in range(STEPS)
    ]
    for step, batch in trainer.trained.items():
        assert all(step - group.oldest.step <= 2 for group in batch.groups if group.oldest)
    service.kill()
    recorded = {batch.step: batch for batch in recorded_batches(service.folder / "journal")}
    assert recorded.keys() == trainer.trained.keys()
    for step, batch in recorded.items():
        assert [_content(group) for group in batch.groups] == [
            _content(group) for group in trainer.trained[step].groups
        ]


def test_a_service_that_is_started_again_listens_where_the_killed_one_did_and_asks_who_is_there(
    start_process: Callable[..., ServiceProcess], make_group: MakeGroup
) -> None:
    service = start_process()
    address = service.address
    worker = Dealer(address, service.config.stream, name="w")
    hello = Hello(run=RUN, role="generator", name="w", servers=(ServerState(name="s", version=V0),))
    learner = Dealer(address, service.config.stream, name="learner-0")
    try:
        learner.send(Hello(run=RUN, role="learner", name="learner-0", version=V0))
        worker.send(hello)
        worker.send(Credit(capacity=9))
        tickets = receive_tickets(worker, 4)
        for ticket in tickets[:2]:
            assert isinstance(answer(worker, make_group, ticket), Accepted)
        service.kill()
        service.start()
        assert service.address == address
        worker.send(make_group(2))  # nobody knows this worker: it has to come again
        receive(worker, Introduce)
        worker.send(replace(hello, tickets=((2, 0), (3, 0))))
        worker.send(Credit(capacity=9))
        for ticket in tickets[2:]:
            assert isinstance(answer(worker, make_group, ticket), Accepted)
        receive(learner, Welcome)  # the first service's
        learner.send(Heartbeat())
        receive(learner, Introduce)
        learner.send(Hello(run=RUN, role="learner", name="learner-0", version=V0))
        learner.send(Next(step=0))
        received = learner.receive(WAIT)
        while not isinstance(received, ReceivedBatch):
            received = learner.receive(WAIT)
        assert ids(received) == [0, 1]
    finally:
        worker.close()
        learner.close()


def test_a_port_that_was_taken_meanwhile_is_replaced_and_the_file_tells(
    start_process: Callable[..., ServiceProcess],
) -> None:
    service = start_process()
    former = service.address
    service.kill()
    context = zmq.Context()
    thief = context.socket(zmq.ROUTER)
    try:
        thief.bind(former)
        service.start()
        assert service.address != former
        learner = Dealer(service.address, service.config.stream, name="learner-0")
        learner.send(Hello(run=RUN, role="learner", name="learner-0", version=V0))
        assert learner.receive(WAIT) is not None
        learner.close()
    finally:
        thief.close()
        context.term()


def test_a_learner_that_starts_again_gets_the_steps_behind_its_checkpoint_in_the_same_order(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(run={"steps": 9})
    worker, learner = running.worker(), running.learner()
    for ticket in receive_tickets(worker, 4):
        answer(worker, make_group, ticket)
    ledgers: list[Ledger | None] = [None]
    for step in range(2):
        learner.send(Next(step=step))
        ledgers.append(receive(learner, ReceivedBatch).ledger)
    publisher = running.publisher()
    receive(publisher, Roster)
    running.announce(V1, publisher=publisher)
    worker.send(Applied(server="w-server", version=V1))
    receive(publisher, Applied)
    for again in (1, 0):
        learner = running.learner(PolicyVersion(again, incarnation=3 - again), ledgers[again])
        assert running.welcome.published == V1
        for step in range(again, 2):
            learner.send(Next(step=step))
            assert ids(receive(learner, ReceivedBatch)) == [2 * step, 2 * step + 1]
    assert [t.group_id for t in receive_tickets(worker, 2)] == [4, 5]


def test_a_failed_publish_does_not_outlive_the_learner_that_published(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    """Version 2 failed; a learner that begins again at step 0 comes to it by what this server generates now."""
    running = start(run={"steps": 9}, journal={"keep": "none"})
    worker, learner, publisher = running.worker(), running.learner(), running.publisher()
    for ticket in receive_tickets(worker, 4):
        answer(worker, make_group, ticket)
    for step in range(2):
        learner.send(Next(step=step))
        receive(learner, ReceivedBatch)
    running.announce(V1, PolicyVersion(2), publisher=publisher)
    receive(publisher, Roster)
    worker.send(Applied(server="w-server", version=V1))
    receive(publisher, Applied)
    receive_tickets(worker, 2)
    worker.send(PublishFailed(server="w-server", version=PolicyVersion(2), reason="its rank is gone"))
    while not isinstance(publisher.receive(WAIT), PublishFailed):
        pass
    running.learner(PolicyVersion(0, incarnation=1))
    assert [ticket.group_id for ticket in receive_tickets(worker, 4)] == [0, 1, 2, 3]


def test_steps_before_the_oldest_checkpoint_leave_the_disk(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(run={"steps": 60}, journal={"keep": "resume", "segment": 1 << 12})
    worker, learner = running.worker(), running.learner()
    for step in range(30):
        for ticket in receive_tickets(worker, 4 if step == 0 else 2):
            answer(worker, make_group, ticket)
        learner.send(Next(step=step))
        assert ids(receive(learner, ReceivedBatch)) == [2 * step, 2 * step + 1]
        version = PolicyVersion(step + 1)
        running.announce(version)
        worker.send(Applied(server="w-server", version=version))
        learner.send(Saved(version=version, oldest=step))
    deadline = time.monotonic() + WAIT
    segments = list((running.folder / "journal").glob("*.journal"))
    while len(segments) > 4 and time.monotonic() < deadline:
        time.sleep(0.05)
        segments = list((running.folder / "journal").glob("*.journal"))
    assert len(segments) <= 4
    assert int(max(segments).stem) > 4
    learner = running.learner(PolicyVersion(29, incarnation=1))
    learner.send(Next(step=29))
    assert ids(receive(learner, ReceivedBatch)) == [58, 59]


def test_nothing_is_accepted_before_its_record_is_on_the_disk(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(Clock(), journal={"commit_seconds": 1.0, "commit_groups": 3})
    worker = running.worker()
    running.learner()
    tickets = receive_tickets(worker, 4)
    for ticket in tickets[:2]:
        worker.send(make_group(ticket.group_id))
    assert worker.receive(0.3) is None  # two groups wait for a third: the second is never over
    worker.send(make_group(tickets[2].group_id))
    began = time.monotonic()
    assert [receive(worker, Accepted).group_id for _ in range(3)] == [0, 1, 2]
    assert time.monotonic() - began < WAIT


def test_a_full_disk_stops_the_tickets_and_loses_nothing(
    start_process: Callable[..., ServiceProcess], make_group: MakeGroup
) -> None:
    """RLIMIT_FSIZE of the service's process has the effect of a full disk."""
    service = start_process(run={"steps": 99}, replay={"groups_per_step": 2, "max_staleness": 9})
    worker = Dealer(service.address, service.config.stream, name="w")
    learner = Dealer(service.address, service.config.stream, name="learner-0")
    pid, unlimited = service.process.pid, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    try:
        learner.send(Hello(run=RUN, role="learner", name="learner-0", version=V0))
        worker.send(Hello(run=RUN, role="generator", name="w", servers=(ServerState(name="s", version=V0),)))
        worker.send(Credit(capacity=6))
        tickets = receive_tickets(worker, 6)
        for ticket in tickets[:2]:
            assert isinstance(answer(worker, make_group, ticket), Accepted | Tickets)
        (segment,) = (service.folder / "journal").glob("*.journal")
        size = segment.stat().st_size
        header, arena = encode_group(make_group(2, tokens=50_000), 1 << 28)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size + len(header) + len(arena) // 2, resource.RLIM_INFINITY))
        worker.send(make_group(2, tokens=50_000))
        deadline = time.monotonic() + WAIT
        while not service.events_of("journal.full") and time.monotonic() < deadline:
            worker.receive(0.05)
        learner.send(Next(step=0))
        assert service.events_of("journal.full")
        worker.send(make_group(3))
        assert worker.receive(1.5) is None  # neither Accepted nor a ticket
        assert service.process.poll() is None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        messages: list[Message] = []
        while not any(isinstance(message, Accepted) for message in messages):
            messages.append(worker.receive(WAIT))  # type: ignore[arg-type]
        received = learner.receive(WAIT)
        while not isinstance(received, ReceivedBatch):
            received = learner.receive(WAIT)
        assert ids(received) == [0, 1]
        assert len(service.events_of("journal.full")) == len(service.events_of("journal.room")) == 1
    finally:
        worker.close()
        learner.close()
    service.kill()
    recorded = [[group.group_id for group in batch.groups] for batch in recorded_batches(service.folder / "journal")]
    assert recorded == [[0, 1]]


def test_a_full_disk_does_not_keep_the_segments_that_would_free_it(
    start: Callable[..., Running], make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The journal's folder holds so many bytes; the checkpoint, which is elsewhere, needs next to none of them."""
    room, pwritev, folder = [1 << 40], os.pwritev, tmp_path / "journal"

    def limited(file: int, chunks: list[memoryview], offset: int) -> int:
        held = sum(path.stat().st_size for path in folder.glob("*.journal"))
        if held + sum(map(len, chunks)) > room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(file, chunks, offset)

    monkeypatch.setattr(os, "pwritev", limited)
    running = start(run={"steps": 60}, journal={"keep": "resume", "segment": 1 << 12})
    worker, learner = running.worker(), running.learner()
    for step in range(20):
        for ticket in receive_tickets(worker, 4 if step == 0 else 2):
            answer(worker, make_group, ticket)
        learner.send(Next(step=step))
        assert ids(receive(learner, ReceivedBatch)) == [2 * step, 2 * step + 1]
        running.announce(PolicyVersion(step + 1))
        worker.send(Applied(server="w-server", version=PolicyVersion(step + 1)))
    tickets = receive_tickets(worker, 2)
    segments = len(list(folder.glob("*.journal")))
    assert segments > 4
    room[0] = sum(path.stat().st_size for path in folder.glob("*.journal"))
    worker.send(make_group(tickets[0].group_id, version=tickets[0].issued_version))
    deadline = time.monotonic() + WAIT
    while not running.events_of("journal.full") and time.monotonic() < deadline:
        time.sleep(0.01)
    learner.send(Saved(version=PolicyVersion(20), oldest=20))
    receive(worker, Accepted)
    assert len(running.events_of("journal.room")) == 1
    assert len(list(folder.glob("*.journal"))) < segments


def test_a_service_that_starts_on_a_full_disk_first_deletes_what_no_checkpoint_needs(
    start: Callable[..., Running], make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed between the record that a checkpoint was saved and the end of the segments behind it."""
    monkeypatch.setattr(journal.Journal, "compact", lambda *_: [])
    first = start(run={"steps": 60}, journal={"keep": "resume", "segment": 1 << 12})
    folder = first.folder / "journal"
    worker, learner = first.worker(), first.learner()
    for step in range(10):
        for ticket in receive_tickets(worker, 4 if step == 0 else 2):
            answer(worker, make_group, ticket)
        learner.send(Next(step=step))
        receive(learner, ReceivedBatch)
        first.announce(PolicyVersion(step + 1))
        worker.send(Applied(server="w-server", version=PolicyVersion(step + 1)))
    learner.send(Saved(version=PolicyVersion(10), oldest=10))
    deadline = time.monotonic() + WAIT
    while any(slot.step is not None for slot in first.service._durable.buffer.snapshot().slots):  # not received yet
        assert time.monotonic() < deadline
        time.sleep(0.01)
    first.close()
    held, pwritev = sum(path.stat().st_size for path in folder.glob("*.journal")), os.pwritev

    def limited(file: int, chunks: list[memoryview], offset: int) -> int:
        if sum(path.stat().st_size for path in folder.glob("*.journal")) + sum(map(len, chunks)) > held:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(file, chunks, offset)

    monkeypatch.setattr(os, "pwritev", limited)
    second = start(run={"steps": 60}, journal={"keep": "resume", "segment": 1 << 12})
    assert second.service.address
    assert sum(path.stat().st_size for path in folder.glob("*.journal")) < held


def flip_a_byte(segment: Path, group: Group) -> None:
    """In the numbers of a group that is in the segment."""
    _, arena = encode_group(group, 1 << 28)
    content = segment.read_bytes()
    place = content.index(bytes(arena))
    with segment.open("r+b") as file:
        file.seek(place + 3)
        file.write(bytes([content[place + 3] ^ 0xFF]))


def test_frames_that_are_found_damaged_at_their_delivery_are_generated_again(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(run={"steps": 9})
    worker, learner = running.worker(), running.learner()
    for ticket in receive_tickets(worker, 4):
        answer(worker, make_group, ticket)
    for step in range(2):
        learner.send(Next(step=step))
        receive(learner, ReceivedBatch)
    running.announce(V1)
    worker.send(Applied(server="w-server", version=V1))
    assert [ticket.group_id for ticket in receive_tickets(worker, 2)] == [4, 5]
    (segment,) = (running.folder / "journal").glob("*.journal")
    flip_a_byte(segment, make_group(1))
    learner = running.learner(PolicyVersion(0, incarnation=1))
    learner.send(Next(step=0))
    assert receive(learner, Lost).step == 0  # the server may have lost its weights meanwhile
    (again,) = receive_tickets(worker, 1)
    assert (again.group_id, again.attempt, again.prompt_index) == (1, 1, 1)
    assert isinstance(answer(worker, make_group, again), Accepted)
    assert ids(receive(learner, ReceivedBatch)) == [0, 1]
    learner.send(Next(step=1))
    assert ids(receive(learner, ReceivedBatch)) == [2, 3]


def test_a_flipped_byte_in_the_journal_costs_that_group_alone(
    start_process: Callable[..., ServiceProcess], start_worker: Callable[..., ScriptedWorker]
) -> None:
    service = start_process(
        run={"steps": 12},
        generate={"heartbeat": 0.1},
        replay={"groups_per_step": 2, "max_staleness": 1, "lease": 2.0},
        learner={"tick": 0.1},
    )
    published = [0]
    start_worker(service, "a", published)
    trainer = Trainer(service.config, service.folder, published)
    trainer.run(6, lambda: None)
    first = trainer.trained[3]
    service.kill()
    (segment,) = (service.folder / "journal").glob("*.journal")
    flip_a_byte(segment, trainer.trained[3].groups[1])
    service.start()
    assert ["group 7 is generated again" in event["told"] for event in service.events_of("journal.damage")] == [True]
    trainer.step, trainer.ledger, trainer.trained = 3, None, {}
    trainer.run(12, lambda: None)
    assert _content(trainer.trained[3].groups[0]) == _content(first.groups[0])
    assert trainer.trained[3].groups[1].attempt == 1
    assert [[group.group_id for group in trainer.trained[step].groups] for step in range(3, 12)] == [
        [2 * step, 2 * step + 1] for step in range(3, 12)
    ]

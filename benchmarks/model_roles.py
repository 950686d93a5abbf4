"""The roles of the model check: the real state of each, driven by hand, over a network that loses what a real one may.

    Wire       queues between the service and its peers; a broken connection loses what was under way in both directions
    Workshop   a worker: the real Fleet and Outbox, and the words of generate/link.py
    School     a learner: the real ServiceBatches and Publisher, with checkpoints that survive it

Nothing here has a clock or a thread of its own. `Time` stands in for the module `time` in the parts that ask for it.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.config import Config
from streamrl.engine.client import EngineClient
from streamrl.generate.fleet import Fleet
from streamrl.generate.outbox import Outbox
from streamrl.generate.served import INITIAL, ServedModel
from streamrl.learner.batches import Delivery, ServiceBatches
from streamrl.observe.events import EventLog
from streamrl.publish.publisher import _END, Publisher
from streamrl.publish.staging import Staged
from streamrl.publish.transport import Source
from streamrl.stream.codec import decode_batch, encode_group
from streamrl.stream.messages import (
    Accepted,
    Applied,
    BatchHeader,
    Buffer,
    Bye,
    Credit,
    Finished,
    Heartbeat,
    Hello,
    Introduce,
    Message,
    Publish,
    PublishFailed,
    Refused,
    ServerState,
    Stop,
    TicketKey,
    Tickets,
    decode,
    encode,
)
from streamrl.stream.peer import Peer
from streamrl.stream.sockets import Received, ReceivedBatch, _Numbers
from streamrl.types import Batch, Group, Ledger, PolicyVersion, Sample, Ticket, VersionSpan

ANSWER = (0.05, 1.5)  # seconds that a group takes
STRAGGLER = 8.0  # that one in twenty takes
APPLY = (0.05, 0.6)  # that weights take
STEP = (0.1, 0.8)  # that a learner step takes
KEPT = 2  # checkpoints
RESTART = (0.5, 4.0)  # seconds from a crash to the next start


class Time:
    """The module `time` of the simulated processes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Silent(EventLog):
    """Counts events, and keeps none."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts

    def emit(self, event: str, /, **fields: Any) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1

    @contextlib.contextmanager
    def span(self, event: str, /, **fields: Any) -> Iterator[dict[str, Any]]:
        self.emit(event)
        yield {}

    def close(self) -> None:
        return None


Frames = list[memoryview]


@dataclass
class _Line:
    """One peer's connection: what is on its way in either direction."""

    up: deque[Frames] = field(default_factory=deque)
    down: deque[Frames] = field(default_factory=deque)


class Wire:
    """The service's end, as `Router`, for as long as one service lives; the lines outlive it."""

    refused = cut = 0
    address = "tcp://127.0.0.1:1"

    def __init__(self, lines: dict[bytes, _Line], chance: random.Random) -> None:
        self._lines = lines
        self._chance = chance
        self._numbers: dict[bytes, _Numbers] = {}

    def receive(self, timeout: float) -> Received | None:
        """Of any peer that has said something: what the others say meanwhile overtakes it."""
        peers = [peer for peer, line in self._lines.items() if line.up]
        if not peers:
            return None
        peer = self._chance.choice(peers)
        frames = self._lines[peer].up.popleft()
        frames[0], missed = self._numbers.setdefault(peer, _Numbers()).strip(frames[0])
        return Received(peer, frames, missed)

    def send(self, peer: bytes, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        header = self._numbers.setdefault(peer, _Numbers()).stamp(encode(message))
        if peer not in self._lines:
            return False
        self._lines[peer].down.append([memoryview(header), *map(memoryview, frames)])
        return True

    def close(self) -> None:
        return None


class Ends:
    """Where peers connect, instead of `Dealer`."""

    def __init__(self, chance: random.Random) -> None:
        self.lines: dict[bytes, _Line] = {}
        self.lost = 0
        self._chance = chance
        self._count = 0

    def __call__(self, address: str, stream: Any, keys: Path | None = None, name: str = "peer") -> End:
        self._count += 1
        identity = f"{name}:{self._count}".encode()
        line = self.lines[identity] = _Line()
        return End(identity, line, self.lines)

    def breaks(self) -> None:
        """A connection is cut and made again: a run of words under way is lost, in both directions."""
        if not self.lines:
            return
        line = self._chance.choice(list(self.lines.values()))
        for way in (line.up, line.down):
            for _ in range(self._chance.randint(0, len(way))):
                way.pop()  # what was sent last was not through yet
                self.lost += 1


class End:
    """A peer's end of its line, as `Dealer`."""

    def __init__(self, identity: bytes, line: _Line, lines: dict[bytes, _Line]) -> None:
        self.identity = identity
        self.missed = 0
        self._line = line
        self._lines = lines
        self._numbers = _Numbers()

    def send(self, message: Message) -> None:
        self._line.up.append([memoryview(self._numbers.stamp(encode(message)))])

    def send_group(self, group: Group) -> None:
        header, arena = encode_group(group, 1 << 20)
        self._line.up.append([memoryview(self._numbers.stamp(header)), memoryview(arena)])

    def receive(self, timeout: float) -> Message | ReceivedBatch | None:
        if not self._line.down:
            return None
        first, *frames = self._line.down.popleft()
        header, missed = self._numbers.strip(first)
        self.missed += missed
        message = decode(header)
        if isinstance(message, BatchHeader):
            return ReceivedBatch(decode_batch(message, frames), _stats(message), message.ledger)
        return message

    def close(self) -> None:
        """What was said is still heard, as `LINGER` has it; nothing can be said to it."""
        self._line.down.clear()
        if not self._line.up:
            self._lines.pop(self.identity, None)
        else:
            gone = _Line(up=self._line.up)
            self._lines[self.identity] = gone

    def vanish(self) -> None:
        """The process was killed."""
        self._lines.pop(self.identity, None)


def _stats(header: BatchHeader) -> dict[str, Any]:
    return {name: getattr(header.stats, name) for name in header.stats.__struct_fields__}


# -- generation


class _Served(ServedModel):
    """A server without a process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = INITIAL
        self.client: EngineClient
        self.policy = None  # type: ignore[assignment]
        self.whole = True

    @property
    def state(self) -> ServerState:
        return ServerState(name=self.name, version=self.version)


class _Servers(Fleet):
    """The real fleet: which server a request may go to, and what one without weights waits for."""

    def _life(self, place: int) -> ServedModel:
        return _Served(f"server-{self._index}-{place}")

    def begin(self) -> None:
        self._up = {served.name: served for served in self._lives}

    def loses(self, place: int) -> None:
        """A server dies, and is back at once with its first weights."""
        again = self._lives[place] = self._life(place)
        self._floors[again.name] = self._newest
        self._up[again.name] = again


@dataclass
class _Job:
    ticket: Ticket
    due: float
    version: PolicyVersion | None = None  # of its first token


class Workshop:
    """One worker."""

    def __init__(self, config: Config, folder: Path, index: int, world: World) -> None:
        self.name = f"generator-{index}"
        self._config = config
        self._world = world
        self._chance = world.chance
        self.servers = _Servers(config, folder, index, world.events)
        self.servers.begin()
        self._end = world.ends("", None, None, self.name)
        self._missed = 0
        self._running: dict[TicketKey, _Job] = {}
        self._outbox = Outbox()
        self._updates: list[tuple[float, Publish]] = []
        self._beaten = self._progress = world.time.now
        self.greet()

    def act(self) -> None:
        """What a worker does between two looks."""
        while (message := self._end.receive(0.0)) is not None:
            self._hear(message)
        now = self._world.time.now
        for due, publish in [each for each in self._updates if each[0] <= now]:
            self._updates.remove((due, publish))
            self._apply(publish)
        for key, job in list(self._running.items()):
            self._generate(key, job, now)
        if now - self._beaten >= self._config.generate.heartbeat:
            self._beaten = now
            if len(self._outbox) and now - self._progress > self._config.stream.reply_timeout:
                self._progress = now
                self._outbox.again()
            self._end.send(Heartbeat(tickets=(*self._running, *self._outbox.keys)))
        while (group := self._outbox.unsent()) is not None:
            self._end.send_group(group)
            self._outbox.sent(group)

    def greet(self) -> None:
        tickets = (*self._running, *self._outbox.keys)
        self._end.send(
            Hello(run=self._world.run, role="generator", name=self.name, servers=self.servers.states, tickets=tickets)
        )
        self._end.send(Credit(capacity=self._config.generate.groups_in_flight))
        self._outbox.again()

    def dies(self) -> None:
        self._end.vanish()

    def server_dies(self) -> None:
        self.servers.loses(self._chance.randrange(self._config.generate.servers))
        self._updates.clear()
        self.greet()

    def _hear(self, message: Message | ReceivedBatch) -> None:
        if self._end.missed > self._missed:
            self._missed = self._end.missed
            self.greet()
        match message:
            case Introduce():
                self.greet()
            case Tickets(tickets=tickets):
                for ticket in tickets:
                    key = (ticket.group_id, ticket.attempt)
                    if key not in self._running and key not in self._outbox:
                        seconds = STRAGGLER if self._chance.random() < 0.05 else self._chance.uniform(*ANSWER)
                        self._running[key] = _Job(ticket, self._world.time.now + seconds)
            case Accepted(group_id=group_id, attempt=attempt) | Refused(group_id=group_id, attempt=attempt):
                self._progress = self._world.time.now
                self._outbox.answered((group_id, attempt))
            case Publish():
                self._updates.append((self._world.time.now + self._chance.uniform(*APPLY), message))
            case Stop(refused=True, reason=reason):
                raise AssertionError(f"{self.name} was refused: {reason}")

    def _apply(self, publish: Publish) -> None:
        """As `Worker._update` does."""
        served = self.servers.servers.get(publish.server)
        assert isinstance(served, _Served)
        if publish.version < served.version:
            self._end.send(Applied(server=served.name, version=served.version))
            return
        failing = self._world.faulty and self._chance.random() < self._world.failing
        if not failing:
            served.whole = True
            self.servers.set_version(served, publish.version)
            self._end.send(Applied(server=served.name, version=publish.version))
            return
        self._world.count("publish failed")
        served.whole = served.whole and self._chance.random() < 0.5
        lost = not served.whole and served.version != INITIAL
        if lost:
            self.servers.lose_weights(served)
        reason = "the schedule says so"
        self._end.send(
            PublishFailed(server=served.name, version=publish.version, reason=reason, attempt=publish.attempt)
        )
        if lost:
            self.greet()

    def _generate(self, key: TicketKey, job: _Job, now: float) -> None:
        """The first token by what the server has now, the last one by what it has at the end: versions only rise."""
        timed_out = now > job.due + self._config.replay.group_timeout
        floor = max(PolicyVersion(job.ticket.issued_version.step), job.version or INITIAL)
        place = self.servers.choose(key, floor, None)
        if place is not None and not self._whole(place.server):
            place = None  # it is paused until weights come that are whole
        if place is not None and job.version is None:
            job.version = place.version
        if now < job.due or (place is None and not timed_out):
            return
        versions = [job.version, place.version] if job.version is not None and place is not None else []
        del self._running[key]
        self.servers.leave(key)
        self._progress = now
        self._outbox.put(make_group(job.ticket, versions, self._chance))

    def _whole(self, name: str) -> bool:
        served = self.servers.servers[name]
        assert isinstance(served, _Served)
        return served.whole


def make_group(ticket: Ticket, versions: Sequence[PolicyVersion], chance: random.Random) -> Group:
    """Two samples of a token of each version; placeholders without one. One in eight has no signal."""
    if not versions:
        samples: tuple[Sample, ...] = (Sample.placeholder(),) * 2
    else:
        spans = tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions))
        same = chance.random() < 0.125
        samples = tuple(_sample(spans, 0.0 if same else float(index)) for index in range(2))
    return Group(
        group_id=ticket.group_id,
        attempt=ticket.attempt,
        task=ticket.task,
        prompt_index=ticket.prompt_index,
        samples=samples,
        finished=chance.random(),
    )


def _sample(spans: tuple[VersionSpan, ...], reward: float) -> Sample:
    length = len(spans)
    return Sample(
        prompt_ids=np.zeros(1, np.int32),
        output_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        loss_mask=np.ones(length, np.bool_),
        spans=spans,
        reward=reward,
    )


# -- training


class _Source(Source):
    """The bytes of a version are there at once."""

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        return {}

    def send(self, server: ServerState, staged: Staged, check: Callable[[], None]) -> None:
        check()

    def drop(self, server: str) -> None:
        return None

    def close(self) -> None:
        return None


class _Press:
    """The real publisher without its thread: a turn is a look at what the service said, and a step of each publish."""

    def __init__(self, config: Config, folder: Path, version: PolicyVersion, events: EventLog) -> None:
        self.publisher = Publisher(config, folder, version, events)  # `World` keeps its thread from starting
        self._peer = Peer(config, folder, "publisher", self.publisher._opening)
        self._at_once = config.publish.at_once
        self._source = _Source()
        self._going: list[Iterator[None]] = []

    @property
    def free(self) -> bool:
        return not self.publisher._is_new()

    def offer(self, version: PolicyVersion) -> None:
        self.publisher._shared.staged = Staged(version, ())

    def act(self) -> None:
        publisher, peer = self.publisher, self._peer
        if not self._going:
            publisher._hear(peer, 0.0)
            peer.insist()
            staged = publisher._shared.staged
            if staged is None:
                return
            if publisher._is_new():
                publisher._take(peer, staged)
            if not publisher._shared.stopped:
                behind = publisher._behind(staged.version)[: self._at_once]
                self._going = [publisher._publish(peer, self._source, server, staged) for server in behind]
        self._going = [publish for publish in self._going if next(publish, _END) is not _END]

    def bye(self) -> None:
        self._peer.send(Bye())
        self._peer.close()

    def dies(self) -> None:
        end: Any = self._peer._dealer
        end.vanish()


@dataclass(frozen=True)
class Checkpoint:
    """What survives a learner."""

    step: int = 0
    ledger: Ledger | None = None


@dataclass(frozen=True)
class Trained:
    """One step of the surviving history."""

    step: int
    ids: tuple[int, ...]
    prompts: tuple[tuple[str, int], ...]
    digest: tuple[tuple[int, float], ...]  # tells two generations of a group apart


class School:
    """One life of the learner, by the rules of learner/role.py."""

    def __init__(self, config: Config, folder: Path, world: World) -> None:
        self._config = config
        self._world = world
        self._chance = world.chance
        saved = world.checkpoints[-1]
        self.version = PolicyVersion(saved.step, world.incarnations)
        self._source = ServiceBatches(config, folder, self.version, saved.ledger)
        self._press = _Press(config, folder, self.version, world.events)
        self._offered: PolicyVersion | None = None
        self._until: float | None = None  # a step goes on so long
        self._batch: Batch | None = None
        self.finished = self.ended = False

    def act(self) -> None:
        self._press.act()
        if self.ended or (self._until is not None and self._world.time.now < self._until):
            return
        if self.finished:
            self._hear_the_end()
            return
        if self._batch is not None:
            self._train(self._batch)
            self._batch = self._until = None
        if not self._source.begun(0.0):
            return
        if self._publish_is_due():
            self._offer()
            return  # `offer` waits for the version before
        if self.version.step >= self._config.run.steps:
            self._finish()
            return
        delivery = self._source.next(self.version.step, 0.0)
        if delivery.kind == "stop":
            raise AssertionError(f"the run was ended at step {self.version.step}")
        if delivery.batch is not None:
            self._begin(delivery)
        elif self._is_catching_up() and self._offered != self.version:
            self._offer()

    def dies(self) -> None:
        self._press.dies()
        end: Any = self._source._peer._dealer
        end.vanish()

    def _begin(self, delivery: Delivery) -> None:
        batch = self._batch = delivery.batch
        assert batch is not None
        self._until = self._world.time.now + self._chance.uniform(*STEP)
        if self._world.faulty and self._chance.random() < 0.03:
            group = self._chance.choice(batch.groups)
            self._source.quarantined(batch.step, (group.group_id, group.attempt), "the schedule says so")
            self._world.count("quarantined")

    def _train(self, batch: Batch) -> None:
        self._world.trains(batch)
        self.version = PolicyVersion(self.version.step + 1, self.version.incarnation)
        self._source.trained(self.version, 1.0)
        if self.version.step % self._world.checkpoint_every == 0:
            self._save()

    def _save(self) -> None:
        kept = [*self._world.checkpoints, Checkpoint(self.version.step, self._source.ledger)][-KEPT:]
        self._world.checkpoints = kept
        self._source.saved(self.version, kept[0].step)

    def _finish(self) -> None:
        self.finished = True
        self._source._complete = self.version  # as `end` does, which waits
        self._source._peer.send(Finished(version=self.version))

    def _hear_the_end(self) -> None:
        self._source._peer.beat()
        self._source._hear(0.0)
        if self._source._stopped:
            self.ended = True
            self._press.bye()
            self._source.close()

    def _publish_is_due(self) -> bool:
        if self._is_catching_up() or self._offered == self.version:
            return False
        step = self.version.step
        last = step >= self._config.run.steps
        return self._offered is None or step % self._config.publish.every == 0 or last

    def _is_catching_up(self) -> bool:
        published = self._source.published
        return published is not None and self.version.step < published.step

    def _offer(self) -> None:
        if self._press.free:
            self._press.offer(self.version)
            self._offered = self.version


class World:
    """What the roles share: time, chance, the network, what survives, and what is counted."""

    def __init__(self, chance: random.Random, run: str) -> None:
        self.chance = chance
        self.run = run
        self.time = Time()
        self.ends = Ends(chance)
        self.counts: dict[str, int] = {}
        self.events = Silent({})
        self.faulty = True
        self.failing = 0.2  # share of publishes
        self.incarnations = 0
        self.checkpoint_every = 3
        self.checkpoints: list[Checkpoint] = [Checkpoint()]
        self.trains: Callable[[Batch], None] = lambda batch: None

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

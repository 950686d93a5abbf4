"""A worker in the model check: the real Fleet and Session, driven by hand with the words of generate/link.py."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.model_network import World
from streamrl.config import Config
from streamrl.generate.fleet import Fleet
from streamrl.generate.served import INITIAL, ServedModel
from streamrl.stream.messages import (
    Accepted,
    Applied,
    Bye,
    Credit,
    Heartbeat,
    Hello,
    Message,
    Publish,
    PublishFailed,
    Refused,
    ServerState,
    Stop,
    TicketKey,
    Tickets,
)
from streamrl.stream.session import Session, Word
from streamrl.stream.sockets import ReceivedBatch
from streamrl.types import Group, PolicyVersion, Sample, Ticket, VersionSpan

ANSWER = (0.05, 1.5)  # seconds that a group takes
STRAGGLER = 8.0  # that one in twenty takes
APPLY = (0.05, 0.6)  # that weights take


class _Served(ServedModel):
    """A server without a process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = INITIAL
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


class WorkerModel:
    """One worker."""

    def __init__(self, config: Config, folder: Path, index: int, world: World) -> None:
        self.name = f"generator-{index}"
        self._config = config
        self._world = world
        self._chance = world.chance
        self.servers = _Servers(config, folder, index, world.events)
        self.servers.begin()
        self._end = world.ends("", None, None, self.name)
        self._running: dict[TicketKey, _Job] = {}
        self._session: Session[TicketKey] = Session(
            "", world.time.now, opening=self._opening, reply_timeout=config.stream.reply_timeout
        )
        self._updates: list[tuple[float, Publish]] = []
        self._beaten = world.time.now
        self._session.connected()
        self._say()

    def act(self) -> None:
        """What a worker does between two looks."""
        while (message := self._end.receive(0.0)) is not None:
            self._handle(message)
        now = self._world.time.now
        for due, publish in [each for each in self._updates if each[0] <= now]:
            self._updates.remove((due, publish))
            self._apply(publish)
        for key, job in list(self._running.items()):
            self._generate(key, job, now)
        if now - self._beaten >= self._config.generate.heartbeat:
            self._beaten = now
            self._session.tick(now)
            self._say(Heartbeat(tickets=self._tickets))
        while (unsent := self._session.outbox.unsent()) is not None:
            key, group = unsent
            self._say(group)
            self._session.outbox.sent(key)

    def greet(self) -> None:
        self._session.changed()
        self._say()

    @property
    def _tickets(self) -> tuple[TicketKey, ...]:
        return (*self._running, *self._session.outbox.keys)

    def _opening(self) -> Iterator[Message]:
        servers = self.servers.states
        yield Hello(run=self._world.run, role="generator", name=self.name, servers=servers, tickets=self._tickets)
        yield Credit(capacity=self._config.generate.groups_in_flight)

    def _say(self, *words: Word) -> None:
        for word in self._session.owed(self._world.time.now, [*words]):
            self._end.send(word)

    def dies(self) -> None:
        self._end.vanish()

    def server_dies(self) -> None:
        self.servers.loses(self._chance.randrange(self._config.generate.servers))
        self._updates.clear()
        self.greet()

    def _handle(self, received: Message | ReceivedBatch) -> None:
        message = self._session.handle(received, self._end.missed, self._world.time.now)
        self._say()
        match message:
            case Tickets(tickets=tickets):
                for ticket in tickets:
                    key = (ticket.group_id, ticket.attempt)
                    if key not in self._tickets:
                        seconds = STRAGGLER if self._chance.random() < 0.05 else self._chance.uniform(*ANSWER)
                        self._running[key] = _Job(ticket, self._world.time.now + seconds)
            case Accepted(group_id=group_id, attempt=attempt) | Refused(group_id=group_id, attempt=attempt):
                self._session.answered((group_id, attempt), self._world.time.now)
            case Publish():
                self._updates.append((self._world.time.now + self._chance.uniform(*APPLY), message))
            case Stop():
                self._say(Bye())

    def _apply(self, publish: Publish) -> None:
        """As `Worker._update` does."""
        served = self.servers.servers.get(publish.server)
        assert isinstance(served, _Served)
        if publish.version < served.version:
            self._say(Applied(server=served.name, version=served.version))
            return
        failing = self._world.faulty and self._chance.random() < self._world.failing
        if not failing:
            served.whole = True
            self.servers.set_version(served, publish.version)
            self._say(Applied(server=served.name, version=publish.version))
            return
        self._world.count("publish failed")
        served.whole = served.whole and self._chance.random() < 0.5
        lost = not served.whole and served.version != INITIAL
        if lost:
            self.servers.lose_weights(served)
        reason = "the schedule says so"
        self._say(PublishFailed(server=served.name, version=publish.version, reason=reason, attempt=publish.attempt))
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
        self._session.put(key, make_group(job.ticket, versions, self._chance), now)

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

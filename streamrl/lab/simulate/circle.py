"""The circle of a run in simulated time: the real replay service, and models of everything round it.

    server (a model) ─▶ group ─▶ replay/core.py ─▶ batch ─▶ learner (a model) ─▶ publisher (a model) ─▶ server ...
       ▲                            │
       └────────── tickets ─────────┘

The roles send what they send in a run (`stream/messages.py`), and the service answers: tickets, leases, orders,
filters, what is given up, batches, acknowledged versions and the phases of the run are its own. Here are the roles and
the time. The result is the rows that a run writes to metrics.jsonl, as far as time and staleness go.
"""

from __future__ import annotations

import logging
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.in_flight import wanted
from streamrl.lab.simulate.clock import Clock
from streamrl.lab.simulate.figures import Figures, figures, mean, staleness
from streamrl.lab.simulate.model import Model
from streamrl.lab.simulate.server import RECOMPUTING, Done
from streamrl.lab.simulate.site import Frames, Site, make_group, make_server, places_of, share_of
from streamrl.replay.core import Core
from streamrl.stream.messages import (
    Announce,
    Applied,
    Asleep,
    BatchHeader,
    Buffer,
    Credit,
    Finished,
    Heartbeat,
    Hello,
    Measured,
    Message,
    Next,
    Progress,
    Publish,
    PublishFailed,
    Roster,
    Saved,
    ServerState,
    Sleep,
    Stop,
    Tickets,
    Wake,
)
from streamrl.types import Batch, Group, PolicyVersion, Ticket

SIMULATIONS = 8  # whose mean is what is expected of a run

TURN = 0.2  # seconds between two turns of the service's loop without a message, as in replay/service.py
SHORTEST = 1e-4  # seconds between two turns, so that time passes

# Heartbeats of a run that one of a simulation replaces: half of the silence after which a worker counts as lost.
BEATS = 5

LEARNER, PUBLISHER = b"learner-0", b"publisher-0"


class Circle:
    """One simulation. The same arguments give the same rows."""

    def __init__(self, config: Config, model: Model, seed: int = 0) -> None:
        """`config`: its sections replay, publish, generate, task, checkpoint and run count."""
        self._config = config
        self._model = model
        self._rng = random.Random(seed)
        self._clock = Clock()
        self._core = Core.in_memory(config, self._from_service)
        self._sent: list[tuple[bytes, Message, Sequence[Buffer]]] = []  # by the service, and not yet received
        self._has_news = False  # the service has got something since its last turn
        self._due = 0.0  # the last turn that was arranged for a ticket
        self._stop: Stop | None = None
        self._sites = [site for index in range(config.workers) for site in self._sites_of(index)]
        self._by_identity = {site.identity: site for site in self._sites}
        self._version = 0  # step of the learner's weights
        self._asked_at = 0.0
        self._batch_taken = 0.0  # when the last batch was taken
        self._servers: tuple[ServerState, ...] = ()  # as the publisher knows them
        self._offered = PolicyVersion(0)
        self._left: deque[str] = deque()  # servers that are to get it
        self._rounds = 0  # servers that are being updated
        self._publishing = False
        self._offer_waits: Callable[[], None] | None = None
        self.rows: list[dict[str, Any]] = []
        self.groups: list[Group] = []  # as they arrived; their arrays have lengths and no content
        self.updates: list[dict[str, Any]] = []  # of the servers, with the fields of the event publish.apply

    def run(self) -> list[dict[str, Any]]:
        """To the end of `run.steps`, and of the run. Raises ConfigError where the service gives the run up."""
        with _quiet("streamrl.replay"):
            self._begin_all()
            self._every(TURN, lambda: None)
            self._every(min(self._config.replay.lease / 2, BEATS * self._config.generate.heartbeat), self._beat)
            while self._stop is None:
                self._clock.step()
                self._turn()
        if self._stop.failed:
            raise ConfigError(f"the simulated run fails at step {len(self.rows)}: {self._stop.reason}")
        return self.rows

    def _sites_of(self, index: int) -> list[Site]:
        """A worker of several servers is taken for as many workers: each has its share of what it may have open."""
        own = self._config.of_worker(index).generate
        speed, longest = self._model.server, own.sampling.max_new_tokens
        if self._model.longest is not None and longest >= self._model.longest:
            longest = sys.maxsize  # all turns of an answer may have more together
        if self._config.publish.interruption not in RECOMPUTING:
            speed = replace(speed, again=0.0)
        sites = []
        for number in range(own.servers):
            places = places_of(self._config, own, speed.max_running, number)
            if places is None:
                capacity = share_of(number, own, own.groups_in_flight)
            else:
                capacity = wanted(places, own.group_size, 0, 0)
            name = f"generator-{index}.{number}" if own.servers > 1 else f"generator-{index}"
            sites.append(Site(name, capacity, make_server(speed, places), longest, places))
        return sites

    # -- the service

    def _from_service(self, peer: bytes, message: Message, frames: Sequence[Buffer]) -> bool:
        """Its `send`."""
        self._sent.append((peer, message, frames))
        return True

    def _to_service(self, peer: bytes, message: Message) -> None:
        self._core.handle_message(peer, message, self._clock.now)
        self._has_news = True

    def _turn(self) -> None:
        """Its loop, as long as there is news; what it sends arrives at once."""
        while self._has_news:
            self._has_news = False
            self._core.tick(self._clock.now, emptied=True)
            sent, self._sent = self._sent, []
            for peer, message, frames in sent:
                self._receive(peer, message, frames)
        self._turn_when_due()

    def _turn_when_due(self) -> None:
        """A ticket that is held back goes out at its time, as in the service's own loop."""
        wait = self._core.longest_wait(self._clock.now, TURN)
        if wait < TURN and self._due != (due := self._clock.now + max(wait, SHORTEST)):
            self._due = due
            self._clock.at(due, self._news)

    def _news(self) -> None:
        self._has_news = True

    def _receive(self, peer: bytes, message: Message, frames: Sequence[Buffer]) -> None:
        """What is not here, nobody waits for."""
        match message:
            case Tickets(tickets=tickets):
                for ticket in tickets:
                    self._clock.after(self._model.hand_out, partial(self._begin, self._by_identity[peer], ticket))
            case Publish(version=version):
                self._clock.after(self._model.transfer, partial(self._interrupt, self._by_identity[peer], version))
            case Sleep() | Wake():
                self._order(self._by_identity[peer], message)
            case Applied() | PublishFailed():
                self._rounds -= 1
                if not self._rounds:
                    self._publish()
            case Roster(servers=servers):
                self._servers = servers
            case BatchHeader():
                self._handle_batch(message, frames)
            case Stop():
                self._stop = message

    def _every(self, seconds: float, action: Callable[[], None]) -> None:
        """A turn of the service in this rhythm, after the action."""

        def again() -> None:
            action()
            self._has_news = True
            self._clock.after(seconds, again)

        self._clock.after(seconds, again)

    def _begin_all(self) -> None:
        run, first = self._core.run_id, PolicyVersion(0)
        self._to_service(LEARNER, Hello(run=run, role="learner", name=LEARNER.decode(), version=first))
        self._to_service(PUBLISHER, Hello(run=run, role="publisher", name=PUBLISHER.decode(), version=first))
        for site in self._sites:
            server = ServerState(name=site.name, version=first)
            self._to_service(site.identity, Hello(run=run, role="generator", name=site.name, servers=(server,)))
            self._to_service(site.identity, Credit(capacity=site.capacity))
        self._ask()
        self._turn()

    # -- generation

    def _beat(self) -> None:
        for site in self._sites:
            tickets = tuple((ticket.group_id, ticket.attempt) for ticket, _, _ in site.tickets.values())
            self._to_service(site.identity, Heartbeat(tickets=tickets))

    def _begin(self, site: Site, ticket: Ticket) -> None:
        drawn = self._model.answers.draw(self._rng, site.version, self._config.generate.group_size, site.longest)
        site.tickets[ticket.group_id] = (ticket, drawn, self._clock.now)
        if site.drained is not None:
            site.held_back.append(ticket.group_id)
            self._want(site)
            return
        self._advance(site)
        site.server.start(ticket.group_id, drawn.lengths, self._clock.now)
        self._want(site)
        self._watch(site)

    def _want(self, site: Site) -> None:
        """By sample: as many tickets as keep every place in use."""
        if site.places is None:
            return
        group_size, held_back = self._config.generate.group_size, len(site.held_back)
        asked = site.server.samples + held_back * group_size
        capacity = wanted(site.places, group_size, site.server.groups + held_back, asked)
        if capacity != site.capacity:
            site.capacity = capacity
            self._to_service(site.identity, Credit(capacity=capacity))

    def _watch(self, site: Site) -> None:
        """Look again when something next happens in the server."""
        site.wakes += 1
        alarm, due = site.wakes, site.server.next_change

        def wake() -> None:
            if site.wakes == alarm:
                self._advance(site)
                self._watch(site)

        if math.isfinite(due):
            self._clock.at(due, wake)

    def _advance(self, site: Site) -> None:
        for done in site.server.advance(self._clock.now):
            self._clock.at(done.time, lambda done=done: self._arrive(site, done))  # type: ignore[misc]
        if site.drained is not None and site.server.groups == 0:
            site.drained()
        self._want(site)

    def _arrive(self, site: Site, done: Done) -> None:
        """A group reaches the service."""
        ticket, drawn, begun = site.tickets.pop(done.group_id)
        group = make_group(ticket, drawn, done, site.name, begun)
        self.groups.append(group)
        self._core.handle_group(site.identity, group, (Frames.of(group),))
        self._has_news = True

    def _order(self, site: Site, order: Sleep | Wake) -> None:
        """A turn on shared devices begins."""
        self._advance(site)
        if isinstance(order, Wake):
            site.server.wake(self._clock.now)
        else:
            site.server.sleep(self._clock.now)
            self._to_service(site.identity, Asleep(number=order.number))
        self._watch(site)

    # -- training

    def _ask(self) -> None:
        self._asked_at = self._clock.now
        self._to_service(LEARNER, Next(step=self._version))

    def _handle_batch(self, header: BatchHeader, frames: Sequence[Buffer]) -> None:
        """The batch that the learner waits for. Of placeholders there are real frames, and no token in them."""
        batch = Batch(step=header.step, groups=tuple(each.group for each in frames if isinstance(each, Frames)))
        row = {"tokens/generated": header.stats.tokens_generated, "idle/generator": self._idle()}
        self._clock.after(self._model.delivery, partial(self._train, batch, row))
        self._has_news = True  # a batch that was taken may let further tickets out

    def _idle(self) -> float:
        """Mean share of the time since the last batch in which a server had nothing."""
        span = self._clock.now - self._batch_taken
        shares = []
        for site in self._sites:
            busy = site.server.busy(self._clock.now)
            shares.append(1.0 - (busy - site.busy) / span if span > 0 else 0.0)
            site.busy = busy
        self._batch_taken = self._clock.now
        return max(0.0, sum(shares) / len(shares))

    def _train(self, batch: Batch, row: dict[str, Any]) -> None:
        row |= {"time/wait": self._clock.now - self._asked_at, **staleness(batch)}
        seconds = self._model.learner.draw(self._rng, row["tokens/trained"])
        self._clock.after(seconds, lambda: self._trained(batch, row))

    def _trained(self, batch: Batch, row: dict[str, Any]) -> None:
        self._version += 1
        if self._config.replay.reuse > 1:
            each = tuple(self._ess(group) for group in batch.groups)
            self._to_service(LEARNER, Measured(step=batch.step, ess=each))
        seen = self._model.signals(row["staleness/mean"]) if row["tokens/trained"] else {}
        signals = {name: seen[name] for name in self._config.replay.adaptive.signals if name in seen}
        self._to_service(LEARNER, Progress(version=PolicyVersion(self._version), signals=signals))
        row["time/publish"] = -self._clock.now  # until the learner goes on
        if self._version % self._config.publish.every and self._version < self._config.run.steps:
            self._end_step(row)
        elif self._publishing:
            self._offer_waits = partial(self._offer, row)
        else:
            self._offer(row)

    def _ess(self, group: Group) -> float | None:
        """The effective sample size of a group in the step that has just trained it, by its mean age."""
        ages = staleness(Batch(step=self._version - 1, groups=(group,)))
        learned = group.has_signal and ages["tokens/trained"]
        return math.exp(-self._model.ess_decay * ages["staleness/mean"]) if learned else None

    def _end_step(self, row: dict[str, Any]) -> None:
        row["time/publish"] += self._clock.now
        row |= {"step": self._version, "time": self._clock.now, "time/step": self._clock.now - self._asked_at}
        self.rows.append(row)
        every = self._config.checkpoint.every
        if every and self._version % every == 0:
            self._clock.after(self._model.save, self._saved)
        else:
            self._clock.after(0.0, self._go_on)

    def _saved(self) -> None:
        self._to_service(LEARNER, Saved(version=PolicyVersion(self._version), oldest=self._version))
        self._go_on()

    def _go_on(self) -> None:
        if self._version < self._config.run.steps:
            self._ask()
        else:
            self._to_service(LEARNER, Finished(version=PolicyVersion(self._version)))

    # -- publishing

    def _offer(self, row: dict[str, Any]) -> None:
        """The learner goes on once its weights are copied; then server after server gets them.

        On shared devices it goes on when they have them.
        """
        self._publishing, self._offered = True, PolicyVersion(self._version)

        def copied() -> None:
            self._clock.after(self._model.announce, self._announce)
            if self._config.run.shares_devices:
                self._offer_waits = partial(self._end_step, row)
            else:
                self._end_step(row)

        self._clock.after(self._model.copy, copied)

    def _announce(self) -> None:
        self._to_service(PUBLISHER, Announce(version=self._offered))
        self._left.extend(server.name for server in self._servers)
        self._publish()

    def _publish(self) -> None:
        """As many servers as get a version at once, all of which must have it before those that are left; at the end
        the learner may offer again."""
        self._rounds = min(self._model.at_once or self._config.publish.at_once, len(self._left))
        if self._rounds:
            for _ in range(self._rounds):
                self._to_service(PUBLISHER, Publish(server=self._left.popleft(), version=self._offered, manifest={}))
            return
        self._publishing = False
        waits, self._offer_waits = self._offer_waits, None
        if waits is not None:
            waits()

    def _interrupt(self, site: Site, version: PolicyVersion) -> None:
        """`publish.interruption`: at once, or once the server has nothing in flight."""
        self._advance(site)
        if self._config.publish.interruption != "drain" or site.server.groups == 0:
            self._update(site, version)
            return

        def drained() -> None:
            site.drained = lambda: None
            self._update(site, version)

        site.drained = drained

    def _update(self, site: Site, version: PolicyVersion) -> None:
        seconds = self._model.update.draw(self._rng, site.server.samples)
        end, name = self._clock.now + seconds, site.name
        update = {"time": end, "seconds": seconds, "version": str(version), "role": name, "tickets": len(site.tickets)}
        self.updates.append(update)
        site.server.update(version.step, seconds)
        self._watch(site)

        def applied() -> None:
            site.version = version.step
            self._let_in(site)
            self._to_service(site.identity, Applied(server=site.name, version=version))

        self._clock.after(seconds, applied)

    def _let_in(self, site: Site) -> None:
        """Requests that a drain held back."""
        site.drained = None
        self._advance(site)
        waiting, site.held_back = site.held_back, []
        for group_id in waiting:
            site.server.start(group_id, site.tickets[group_id][1].lengths, self._clock.now)
        self._watch(site)


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Without its warnings: they would be of a run that nobody has started."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def expected(config: Config, model: Model) -> Figures:
    """The mean of some simulations: a single one is as much a matter of chance as a run of its length.

    Raises ValueError for a run that is too short for figures.
    """
    return mean([figures(Circle(config, model, config.run.seed + each).run()) for each in range(SIMULATIONS)])

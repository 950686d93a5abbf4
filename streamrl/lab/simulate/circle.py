"""The circle of a run in simulated time: servers, the real replay buffer, learner and publisher.

    tickets ─▶ server (a model) ─▶ group ─▶ the run's own Buffer ─▶ batch ─▶ learner (a model) ─▶ publisher (a model)
       ▲                                          ▲                                                    │
       └── assign ────────────────────────────────┴──────────── acknowledged version ◀─────────────────┘

Which tickets may be out, which groups make a step, what is dropped and when a slot is free again is decided by
`replay/buffer.py` and `replay/workers.py` themselves: nothing of the orders or of the bound is modelled anew. The
result is the rows that a run writes to metrics.jsonl, as far as time and staleness go.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamrl.config import Config
from streamrl.lab.simulate.figures import Figures, figures, mean
from streamrl.lab.simulate.model import Model, RecordedGroup
from streamrl.lab.simulate.server import Done, GenerationServer, Span
from streamrl.replay.buffer import make_buffer
from streamrl.replay.workers import Worker, assign
from streamrl.stream.messages import ServerState
from streamrl.types import Batch, Group, PolicyVersion, Sample, Ticket, VersionSpan

SIMULATIONS = 8  # whose mean is what is expected of a run

_NOTHING = np.zeros(1, np.int32)


class Clock:
    """Simulated seconds, and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()  # what is said first happens first at equal times

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Let it happen so many seconds from now."""
        self.at(self.now + seconds, action)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let it happen then."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), action))

    def step(self) -> bool:
        """The next event. False when there is none."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True


@dataclass(slots=True)
class Site:
    """A worker, its server, and what it has been told to generate."""

    worker: Worker
    server: GenerationServer
    longest: int  # tokens of an answer
    tickets: dict[int, tuple[Ticket, RecordedGroup, float]] = field(default_factory=dict)  # and when it came
    held_back: list[int] = field(default_factory=list)  # groups that wait for an update's end
    drained: Callable[[], None] | None = None  # what waits until nothing is in flight
    wakes: int = 0  # number of the newest alarm: the former ones are void
    busy: float = 0.0  # seconds, at the last look


class Circle:
    """One simulation. The same arguments give the same rows."""

    def __init__(self, config: Config, model: Model, seed: int = 0) -> None:
        """`config`: its sections replay, publish, generate, task, checkpoint and run count."""
        self._config = config
        self._model = model
        self._rng = random.Random(seed)
        self._clock = Clock()
        self._buffer = make_buffer(config)
        self._sites = [site for index in range(config.workers) for site in self._sites_of(index)]
        self._by_worker = {site.worker.name: site for site in self._sites}
        self._is_full = False  # no further ticket may be issued to anyone
        self._version = 0  # step of the learner's weights
        self._asked: int | None = None  # the step that the learner waits for
        self._asked_at = 0.0
        self._publishing = False
        self._rounds = 0  # servers that are being updated
        self._offer_waits: Callable[[], None] | None = None
        self._generated = 0  # tokens that arrived since the last batch
        self._looked_at = 0.0  # when the last batch was taken
        self.rows: list[dict[str, Any]] = []
        self.groups: list[Group] = []  # as they arrived; their arrays have lengths and no content
        self.updates: list[dict[str, Any]] = []  # of the servers, with the fields of the event publish.apply

    def run(self) -> list[dict[str, Any]]:
        """To the end of `run.steps`. Raises ValueError for a circle that stands still."""
        self._buffer.begin(PolicyVersion(0))
        self._buffer.acknowledge(PolicyVersion(0))
        self._ask()
        while len(self.rows) < self._config.run.steps:
            if not self._clock.step():
                raise ValueError(f"the circle stands still at step {len(self.rows)}: nothing is under way")
        return self.rows

    def _sites_of(self, index: int) -> list[Site]:
        """A worker of several servers is taken for as many workers: each has its share of what it may have open."""
        own = self._config.of_worker(index).generate
        capacity = math.ceil(own.groups_in_flight / own.servers)
        return [
            self._site(f"{index}.{number}" if own.servers > 1 else f"{index}", capacity, own.sampling.max_new_tokens)
            for number in range(own.servers)
        ]

    def _site(self, number: str, capacity: int, longest: int) -> Site:
        name, server = f"generator-{number}", f"server-{number}"
        states = {server: ServerState(name=server, version=PolicyVersion(0))}
        worker = Worker(name, name.encode(), 0.0, states, capacity=capacity)
        return Site(worker, GenerationServer(self._model.server), longest)

    # -- generation

    def _hand_out(self) -> None:
        """Every ticket that may be issued now, to the workers that the service would choose."""
        for given_up in self._buffer.exhausted():
            group = _placeholders(given_up, self._config.generate.group_size)
            self._buffer.complete_placeholder(group, (group,), 0)
        workers = [site.worker for site in self._sites]
        for name, tickets in assign(self._buffer, workers, self._clock.now).items():
            site = self._by_worker[name]
            for ticket in tickets:
                self._clock.after(self._model.hand_out, lambda site=site, ticket=ticket: self._begin(site, ticket))  # type: ignore[misc]
        self._buffer.drain()
        newest = max(worker.newest or PolicyVersion(0) for worker in workers)
        self._is_full = any(each.newest == newest and each.capacity > self._buffer.held(each.name) for each in workers)

    def _begin(self, site: Site, ticket: Ticket) -> None:
        size, policy = self._config.generate.group_size, next(iter(site.worker.servers.values())).version.step
        drawn = self._model.answers.draw(self._rng, policy, size, site.longest)
        site.tickets[ticket.group_id] = (ticket, drawn, self._clock.now)
        if site.drained is not None:
            site.held_back.append(ticket.group_id)
            return
        self._advance(site)
        site.server.start(ticket.group_id, drawn.lengths, self._clock.now)
        self._watch(site)

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

    def _arrive(self, site: Site, done: Done) -> None:
        """A group reaches the service."""
        ticket, drawn, begun = site.tickets.pop(done.group_id)
        group = _group(ticket, drawn, done, site.worker.name, begun)
        self.groups.append(group)
        self._generated += group.tokens
        stored = self._buffer.complete(site.worker.name, group, (group,), 0)
        self._deliver()
        # Where workers with room got nothing, one more of them with room changes nothing: what comes back frees no
        # slot. Without this, hundreds of servers would be asked in vain for every group.
        if stored is None or not self._is_full or not self._buffer.order.waits_for_weights:
            self._hand_out()

    # -- training

    def _ask(self) -> None:
        self._asked, self._asked_at = self._version, self._clock.now
        self._deliver()
        self._hand_out()  # what was found too old is to be generated again

    def _deliver(self) -> None:
        """The batch that the learner waits for, if it is complete."""
        if self._asked is None:
            return
        stored = self._buffer.pop(self._asked)
        if stored is None:
            return
        groups = tuple(each.frames[0] for each in stored if each.frames is not None)
        batch = Batch(step=self._asked, groups=groups)
        self._asked = None
        row = {"tokens/generated": self._generated, "idle/generator": self._idle()}
        self._generated = 0
        self._clock.after(self._model.delivery, lambda: self._train(batch, row))

    def _idle(self) -> float:
        """Mean share of the time since the last batch in which a server had nothing."""
        span = self._clock.now - self._looked_at
        shares = []
        for site in self._sites:
            busy = site.server.busy(self._clock.now)
            shares.append(1.0 - (busy - site.busy) / span if span > 0 else 0.0)
            site.busy = busy
        self._looked_at = self._clock.now
        return max(0.0, sum(shares) / len(shares))

    def _train(self, batch: Batch, row: dict[str, Any]) -> None:
        row |= {"time/wait": self._clock.now - self._asked_at, **staleness(batch)}
        seconds = self._model.learner.draw(self._rng, row["tokens/trained"])
        self._clock.after(seconds, lambda: self._trained(row))

    def _trained(self, row: dict[str, Any]) -> None:
        self._version += 1
        ess = math.exp(-self._model.ess_decay * row["staleness/mean"])
        self._buffer.progress(PolicyVersion(self._version), ess)
        self._buffer.saved(self._version)  # no step is delivered again here: the buffer may forget them
        self._hand_out()
        row["time/publish"] = -self._clock.now  # until the learner goes on
        if self._version % self._config.publish.every and self._version < self._config.run.steps:
            self._end_step(row)
        elif self._publishing:
            self._offer_waits = lambda: self._offer(row)
        else:
            self._offer(row)

    def _end_step(self, row: dict[str, Any]) -> None:
        row["time/publish"] += self._clock.now
        row |= {"step": self._version, "time": self._clock.now, "time/step": self._clock.now - self._asked_at}
        self.rows.append(row)
        every = self._config.checkpoint.every
        self._clock.after(self._model.save if every and self._version % every == 0 else 0.0, self._ask)

    # -- publishing

    def _offer(self, row: dict[str, Any]) -> None:
        """The learner goes on once its weights are copied; then server after server gets them."""
        version, sites = PolicyVersion(self._version), iter(self._sites)
        self._publishing = True

        def copied() -> None:
            for _ in range(min(self._model.at_once, len(self._sites))):
                self._rounds += 1
                self._clock.after(self._model.announce, lambda: self._publish(version, sites))
            self._end_step(row)

        self._clock.after(self._model.copy, copied)

    def _publish(self, version: PolicyVersion, sites: Iterator[Site]) -> None:
        """One server, then the next that is left; at the end the learner may offer again."""
        site = next(sites, None)
        if site is not None:
            self._clock.after(self._model.transfer, lambda: self._interrupt(site, version, sites))
            return
        self._rounds -= 1
        if self._rounds:
            return
        self._publishing = False
        waits, self._offer_waits = self._offer_waits, None
        if waits is not None:
            waits()

    def _interrupt(self, site: Site, version: PolicyVersion, sites: Iterator[Site]) -> None:
        """`publish.interruption`: at once, or once the server has nothing in flight."""
        self._advance(site)
        if self._config.publish.interruption != "drain" or site.server.groups == 0:
            self._update(site, version, sites)
            return

        def drained() -> None:
            site.drained = lambda: None
            self._update(site, version, sites)

        site.drained = drained

    def _update(self, site: Site, version: PolicyVersion, sites: Iterator[Site]) -> None:
        seconds = self._model.update.draw(self._rng, site.server.samples)
        end, name = self._clock.now + seconds, site.worker.name
        noted = {"time": end, "seconds": seconds, "version": str(version), "role": name, "tickets": len(site.tickets)}
        self.updates.append(noted)
        site.server.update(version.step, seconds)
        self._watch(site)

        def applied() -> None:
            for server in site.worker.servers:
                site.worker.applied(server, version)
            news = self._buffer.acknowledge(version)
            self._let_in(site)
            if news or not self._is_full or not self._buffer.order.waits_for_weights:
                self._hand_out()
            self._publish(version, sites)

        self._clock.after(seconds, applied)

    def _let_in(self, site: Site) -> None:
        """Requests that a drain held back."""
        site.drained = None
        self._advance(site)
        waiting, site.held_back = site.held_back, []
        for group_id in waiting:
            site.server.start(group_id, site.tickets[group_id][1].lengths, self._clock.now)
        self._watch(site)


def expected(config: Config, model: Model) -> Figures:
    """The mean of some simulations: a single one is as much a matter of chance as a run of its length.

    Raises ValueError for a run that is too short for figures.
    """
    return mean([figures(Circle(config, model, config.run.seed + each).run()) for each in range(SIMULATIONS)])


def staleness(batch: Batch) -> dict[str, float]:
    """`tokens/trained` and `staleness/` of a batch, as `learner/batch_metrics.py` counts them, from the spans alone."""
    tokens: Counter[int] = Counter()
    for sample in batch.samples:
        for span in sample.spans:
            tokens[max(0, batch.step - span.version.step)] += span.end - span.start
    total, below, p95 = tokens.total(), 0, 0
    for age in sorted(tokens):
        below += tokens[age]
        p95 = age
        if below >= math.ceil(0.95 * (total - 1)) + 1:
            break
    return {
        "tokens/trained": total,
        "staleness/mean": sum(age * count for age, count in tokens.items()) / max(1, total),
        "staleness/p95": float(p95),
        "staleness/max": max(tokens, default=0),
    }


def _group(ticket: Ticket, drawn: RecordedGroup, done: Done, worker: str, begun: float) -> Group:
    """What the worker would send: as many tokens as were drawn, of the versions that drew them."""
    samples = zip(drawn.lengths, drawn.rewards, drawn.passed, done.spans, strict=True)
    return Group(
        group_id=ticket.group_id,
        attempt=ticket.attempt,
        task=ticket.task,
        prompt_index=ticket.prompt_index,
        samples=tuple(_sample(length, reward, passed, spans) for length, reward, passed, spans in samples),
        worker=worker,
        started=begun,
        finished=done.time,
    )


def _placeholders(ticket: Ticket, size: int) -> Group:
    """What the service puts in the place of a group that it gives up."""
    return Group(
        group_id=ticket.group_id,
        attempt=ticket.attempt,
        task=ticket.task,
        prompt_index=ticket.prompt_index,
        samples=(Sample.placeholder(failure="lost"),) * size,
    )


def _sample(length: int, reward: float, passed: bool, spans: list[Span]) -> Sample:
    """Its arrays are views of a single number: nobody reads more of them than their length."""
    nothing = np.broadcast_to(_NOTHING, (length,))
    return Sample(
        prompt_ids=_NOTHING,
        output_ids=nothing,
        logprobs=nothing,
        loss_mask=np.broadcast_to(np.True_, (length,)),
        spans=tuple(VersionSpan(PolicyVersion(step), begin, end) for step, begin, end in spans),
        reward=reward,
        reward_parts={"exact": float(passed)},
    )

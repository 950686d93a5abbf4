"""A run in miniature for property tests: workers, a learner with checkpoints, a publisher, a journal, crashes.

`Schedule` is a hypothesis state machine round the real buffer. Whatever order of events hypothesis finds: no
token is older than the bound, every step is made of groups that no earlier step of the surviving history has,
a step that is delivered again is the same, a recovered buffer equals the one that crashed, and from any
point one worker that does its work brings the run to its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.config import Config
from streamrl.replay.buffer import Buffer, make_buffer
from streamrl.replay.controllers.base import Controller, Move, Seen
from streamrl.replay.history import Contents
from streamrl.replay.life import Phase
from streamrl.replay.lives import Lives
from streamrl.replay.records import AnyRecord, Completed, Consumed, Place, Snapshot, Stored
from streamrl.replay.refusals import DuplicateGroup, GroupRefused
from streamrl.types import Group, Ledger, PolicyVersion, Sample, Ticket, VersionSpan

STEPS = 7
WISH = "staleness/mean"  # of `Erratic`
WORKERS = ("a", "b", "c")
NEW = PolicyVersion(0)


def answer(ticket: Ticket, version: PolicyVersion, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    """A group of one-token samples that answers a ticket."""
    one = np.zeros(1, np.int32)
    samples = [
        Sample(
            prompt_ids=one,
            output_ids=one,
            logprobs=np.zeros(1, np.float32),
            loss_mask=np.ones(1, np.bool_),
            spans=(VersionSpan(version, 0, 1),),
            reward=reward,
        )
        for reward in rewards
    ]
    return _group(ticket, tuple(samples))


def placeholder(ticket: Ticket) -> Group:
    """What the service makes of an exhausted ticket."""
    none = Sample(
        prompt_ids=np.zeros(1, np.int32),
        output_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        loss_mask=np.zeros(0, np.bool_),
        spans=(),
        reward=0.0,
        finish_reason="placeholder",
    )
    return _group(ticket, (none, none))


def _group(ticket: Ticket, samples: tuple[Sample, ...]) -> Group:
    return Group(
        group_id=ticket.group_id,
        attempt=ticket.attempt,
        task=ticket.task,
        prompt_index=ticket.prompt_index,
        samples=samples,
    )


class Erratic(Controller):
    """Moves the adaptive bound with every step to wherever it is told."""

    signals = (WISH,)

    def judge(self, seen: Seen) -> Move | None:
        return Move(seen.signals[WISH], "drawn")


def check_indexes(lives: Lives) -> None:
    """Are the tickets that are out, their holders, what waits and what is exhausted what the records say?"""
    of_phase: dict[Phase, set[int]] = {phase: set() for phase in Phase}
    for group_id, life in lives.items():
        of_phase[life.phase].add(group_id)
    assert lives.out.keys() == of_phase[Phase.ISSUED]
    assert lives.exhausted.keys() == of_phase[Phase.EXHAUSTED]
    first = lives.first_waiting
    assert (first and first.group_id) == min(of_phase[Phase.WAITING], default=None)
    holders = {life.holder for life in lives.values()} - {None}
    for holder in holders:
        held = {group_id for group_id, life in lives.items() if life.holder == holder}
        assert {life.group_id for life in lives.of(holder)} == held <= of_phase[Phase.ISSUED]
        assert lives.held(holder) == len(held)


class Schedule(RuleBasedStateMachine):
    """Workers with one server each, a learner, and a publisher that does only every k-th version."""

    orders: ClassVar[tuple[str, ...]] = ("fifo", "synchronous", "windowed", "ready", "ready, pass")
    make: ClassVar[Any] = staticmethod(make_buffer)  # what a test of the tests replaces

    @initialize(
        order=st.deferred(lambda: st.sampled_from(Schedule.orders)),
        staleness=st.sampled_from([0, 1, 2, 3, 0.5, 1.25, 1.75, 2.5]),
        groups=st.integers(1, 4),
        journalled=st.booleans(),
        filtered=st.booleans(),
        wishes=st.lists(st.floats(-1, 5), max_size=STEPS),
        attempts=st.sampled_from([1, 2, 10**6]),
        data=st.data(),
    )
    def begin(
        self,
        *,
        order: str,
        staleness: float,
        groups: int,
        journalled: bool,
        filtered: bool,
        wishes: list[float],
        attempts: int,
        data: st.DataObject,
    ) -> None:
        bound = 0 if order == "synchronous" else staleness
        reuse = self.reuse(data, groups, bound)
        fresh = groups - round(reuse.get("reuse_share", 0.0) * groups)
        widest = int((bound + 1) * fresh) - groups + 1
        window = data.draw(st.integers(1, widest), label="window") if order == "windowed" else 1
        slots = int((bound + 1) * fresh) - (window - 1)
        self.interval = data.draw(st.integers(1, slots // groups), label="publish interval")
        mix = [{"label": "x", "weight": 2}, {"label": "y"}, {"label": "never", "weight": 0}][: 3 if groups > 1 else 1]
        self.config = Config.model_validate(
            {
                "run": {"steps": STEPS},
                "task": {"mix": mix},
                "publish": {"every": self.interval},
                "replay": {
                    "order": order.partition(",")[0],
                    "over_age": "pass" if order.endswith("pass") else "drop",
                    "window": window,
                    "groups_per_step": groups,
                    "max_staleness": staleness,
                    "lease": 30.0,
                    "group_timeout": 300.0,
                    "max_attempts": attempts,
                    "filter": {"signal": filtered, "tries": 3},
                    "adaptive": {"enabled": bool(wishes), "controller": f"{__file__}:Erratic"},
                    **reuse,
                },
            }
        )
        self.wishes = wishes
        self.groups, self.journalled, self.now = groups, journalled, 0.0
        self.buffer: Buffer = self.make(self.config)
        self.snapshot: Snapshot | None = None
        self.delivered_before: dict[int, list[int]] = {}  # the snapshot
        self.journal: list[AnyRecord | tuple[Completed, Place]] = []  # since the snapshot
        self.sealed: list[AnyRecord | tuple[Completed, Place]] = []  # before it
        self.needed = 0  # records that something outside depends on: the fsync has happened
        self.disturbed = False  # a restart: slots above the capacity may exist for a moment
        self.torn = False  # records that were durable are lost
        self.servers = dict.fromkeys(WORKERS, NEW)
        self.open: dict[tuple[int, int], tuple[str, Ticket]] = {}
        self.doubtful: set[tuple[int, int]] = set()  # out when the service crashed: it may not know them
        self.dead: list[Ticket] = []
        self.accepted: dict[tuple[int, int], Group] = {}  # the newest of this id and attempt
        self.written: dict[Place, Group] = {}  # what a torn journal brings back may be older than that
        self.segment = 0
        self.trained: dict[int, dict[int, Group]] = {}  # the surviving history: by step and id
        self.delivered: dict[int, list[int]] = {}  # by the record of the batch
        self.position, self.incarnation = 0, 0  # of the learner: the step that it trains next
        self.ledger: Ledger | None = None  # of its weights
        self.checkpoints: list[tuple[int, Ledger | None]] = [(0, None)]
        self.started = 0
        self.published = NEW
        self.hello()

    # -- workers

    @rule(worker=st.sampled_from(WORKERS))
    def issue(self, worker: str) -> None:
        ticket = self.buffer.issue(worker, self.servers[worker], self.now)
        if ticket is None:
            return
        assert self.servers[worker].step >= ticket.issued_version.step
        key = ticket.group_id, ticket.attempt
        assert key not in self.open or key in self.doubtful, "one attempt twice"
        self.doubtful.discard(key)
        self.open[key] = worker, ticket
        self.write()

    @rule(stragglers=st.integers(0, 2), older=st.booleans(), signal=st.booleans())
    def work(self, stragglers: int, older: bool, signal: bool) -> None:
        """Every worker takes what it gets; all groups are answered but the oldest ones."""
        for worker in WORKERS:
            self.server_applies(worker)
            self.issue_all(worker)
        for key in sorted(self.open, reverse=True)[: -stragglers or None]:
            worker, ticket = self.open[key]
            version = ticket.issued_version if older else self.servers[worker]
            if version.step >= ticket.issued_version.step:
                self.answer(key, answer(ticket, version, (0.0, 1.0) if signal else (0.0, 0.0)))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), signal=st.booleans(), newer=st.booleans())
    def complete(self, data: st.DataObject, signal: bool, newer: bool) -> None:
        """Mostly the worst case that the ticket allows: every token from its oldest version."""
        key = data.draw(st.sampled_from(sorted(self.open)))
        worker, ticket = self.open[key]
        version = self.servers[worker] if newer else ticket.issued_version
        if version.step < ticket.issued_version.step:
            return
        self.answer(key, answer(ticket, version, (0.0, 1.0) if signal else (0.0, 0.0)))

    def answer(self, key: tuple[int, int], group: Group) -> None:
        worker, _ = self.open.pop(key)
        if key not in self.doubtful:
            with pytest.raises(GroupRefused, match="is the ticket of worker"):
                self.buffer.complete("nobody", group, (), 10)
        try:
            stored = self.buffer.complete(worker, group, (), 10)
        except GroupRefused:
            assert key in self.doubtful, "a good answer was refused"
            self.doubtful.discard(key)
            self.write()
            return
        self.doubtful.discard(key)
        self.accept(group, stored is not None)
        if stored is not None:
            with pytest.raises(DuplicateGroup):
                self.buffer.complete(worker, group, (), 10)

    def accept(self, group: Group, kept: bool) -> None:
        if kept:
            self.accepted[group.group_id, group.attempt] = group
        self.write()

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def complete_too_late(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.dead))
        if (ticket.group_id, ticket.attempt) in self.open:
            return
        with pytest.raises(GroupRefused):
            self.buffer.complete(data.draw(st.sampled_from(WORKERS)), answer(ticket, ticket.issued_version), (), 10)

    @rule(worker=st.sampled_from(WORKERS), excused=st.booleans())
    def worker_dies(self, worker: str, excused: bool) -> None:
        self.die(self.buffer.release(worker, excused=excused))
        for key in [key for key, (holder, _) in self.open.items() if holder == worker]:
            self.doubtful.discard(key)
            self.dead.append(self.open.pop(key)[1])

    @rule(worker=st.sampled_from(WORKERS))
    def heartbeat(self, worker: str) -> None:
        self.buffer.extend(worker, self.keys(worker), self.now)

    @rule(seconds=st.sampled_from([1.0, 29.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.die(self.buffer.expire(self.now))

    def keys(self, worker: str) -> list[tuple[int, int]]:
        return [key for key, (holder, _) in self.open.items() if holder == worker]

    def die(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            self.open.pop((ticket.group_id, ticket.attempt), None)
            self.doubtful.discard((ticket.group_id, ticket.attempt))
        self.dead += tickets

    @rule()
    def placeholders(self) -> None:
        for ticket in self.buffer.exhausted():
            group = placeholder(ticket)
            self.accept(group, self.buffer.complete_placeholder(group, (), 10) is not None)
        assert not self.buffer.exhausted()

    # -- learner and publisher

    @rule()
    def learn(self) -> None:
        self.placeholders()
        if self.train():
            self.publish()

    @rule(steps=st.integers(1, 4), stragglers=st.integers(0, 2), older=st.booleans())
    def go_on(self, steps: int, stragglers: int, older: bool) -> None:
        for _ in range(steps):
            self.work(stragglers, older, signal=True)
            self.learn()

    def train(self) -> bool:
        step = self.position
        if step >= STEPS:
            return False
        again = step < self.buffer.next_step
        batch = self.buffer.pop(step)
        self.write()
        if batch is None:
            assert not again, "a step that was consumed is not there"
            return False
        ids = [stored.group_id for stored in batch]
        assert ids == self.delivered[step], "delivered in another order"
        assert len(set(ids)) == self.groups
        groups = {stored.group_id: self.group(stored) for stored in batch}
        self.check_uses(step, groups)
        assert self.buffer.pop(step) == batch  # a learner that lost it asks again
        self.trained[step] = groups
        self.position += 1
        self.ledger = self.buffer.ledger()
        for wish in self.wishes[step : step + 1]:
            self.buffer.progress(PolicyVersion(self.position), {WISH: wish})
            self.write()
        return True

    def reuse(self, data: st.DataObject, groups: int, bound: float) -> dict[str, Any]:
        """Further keys of the section `replay`."""
        return {}

    def check_uses(self, step: int, groups: dict[int, Group]) -> None:
        ids = list(groups)
        assert not set(ids) & {i for earlier in self.trained.values() for i in earlier}, "trained twice"
        self.check_ages(step, groups.values())
        if self.config.replay.order in ("fifo", "synchronous"):
            assert ids == list(range(step * self.groups, (step + 1) * self.groups))

    def group(self, stored: Stored) -> Group:
        """What its frames are."""
        return self.accepted[stored.group_id, stored.attempt] if stored.place is None else self.written[stored.place]

    def check_ages(self, step: int, groups: Iterable[Group]) -> None:
        worst = self.buffer.order.worst_staleness
        ages = [step - group.oldest.step for group in groups if group.oldest is not None]
        assert worst is None or max(ages, default=0) <= worst, "older than the bound"

    @precondition(lambda self: self.position < self.buffer.next_step)
    @rule(data=st.data())
    def delivered_again_but_damaged(self, data: st.DataObject) -> None:
        ids = st.sampled_from(self.delivered[self.position])
        self.buffer.lose(self.position, data.draw(st.lists(ids, min_size=1, unique=True)))
        self.disturbed = True
        assert self.buffer.next_step == self.position
        self.write()

    @rule()
    def publish(self) -> None:
        step = max(self.started, self.position - self.position % self.interval)
        self.published = PolicyVersion(step, self.incarnation)

    @rule(worker=st.sampled_from(WORKERS))
    def server_applies(self, worker: str) -> None:
        """A server's version never goes back."""
        if self.servers[worker].step <= self.published.step:
            self.servers[worker] = self.published
            self.buffer.acknowledge(self.published)
            self.write()

    @rule(worker=st.sampled_from(WORKERS))
    def server_loses_its_weights(self, worker: str) -> None:
        self.servers[worker] = NEW

    @rule()
    def checkpoint(self) -> None:
        if self.position > self.checkpoints[-1][0]:
            self.checkpoints = [self.checkpoints[-1], (self.position, self.ledger)]
        self.buffer.saved(self.checkpoints[0][0])
        self.write()

    @rule(which=st.integers(0, 1))
    def learner_restarts(self, which: int) -> None:
        del self.checkpoints[which + 1 :]
        self.position, self.ledger = self.checkpoints[-1]
        self.started, self.incarnation = self.position, self.incarnation + 1
        self.trained = {step: ids for step, ids in self.trained.items() if step < self.position}
        self.disturbed = True
        self.hello()

    def hello(self) -> None:
        self.buffer.begin(PolicyVersion(self.position, self.incarnation), self.ledger)
        self.write()
        self.doubtful = set(self.open) if self.disturbed else set()
        for version in self.servers.values():
            self.buffer.acknowledge(version)
        self.write()

    # -- the journal

    def write(self) -> None:
        """Append what was decided; a group and a batch are durable before anything else happens."""
        for record in self.buffer.drain():
            if isinstance(record, Completed) and self.journalled:
                place = Place(self.segment, len(self.journal))
                self.written[place] = self.accepted[record.group_id, record.attempt]
                self.buffer.placed(record.group_id, place)
                self.journal.append((record, place))
            else:
                self.journal.append(record)
            if isinstance(record, Consumed):
                self.delivered[record.step] = list(record.group_ids)
            if isinstance(record, Completed | Consumed):
                self.needed = len(self.journal)

    @precondition(lambda self: self.journalled)
    @rule()
    def segment_rolls(self) -> None:
        self.sealed += self.journal
        self.snapshot, self.journal, self.needed = self.buffer.snapshot(), [], 0
        self.segment += 1
        self.delivered_before = dict(self.delivered)

    @precondition(lambda self: self.journalled)
    @rule(data=st.data())
    def service_crashes(self, data: st.DataObject) -> None:
        """What was not committed yet may be lost; nothing outside depends on it."""
        self.recover(data.draw(st.integers(self.needed, len(self.journal)), label="records left"))

    @precondition(lambda self: self.journalled)
    @rule(data=st.data(), early=st.booleans())
    def service_crashes_and_the_tail_is_torn_off(self, data: st.DataObject, early: bool) -> None:
        left = data.draw(st.integers(0, len(self.journal)), label="records left")
        self.torn = self.torn or left < self.needed
        self.recover(left, early)

    @precondition(lambda self: not self.journalled)
    @rule()
    def service_crashes_without_a_journal(self) -> None:
        self.journal = []
        self.recover(0)

    def recover(self, left: int, early: bool = False) -> None:
        before, whole = self.buffer.snapshot(), left == len(self.journal)
        del self.journal[left:]
        self.needed = min(self.needed, left)
        self.buffer = self.make(self.config)
        self.buffer.restore(self.snapshot, self.journal)
        if whole and self.journalled:
            assert self.buffer.snapshot() == before, "recovered to something else"
        assert not self.buffer.drain()
        self.disturbed = True
        batches = {record.step: list(record.group_ids) for record in self.journal if isinstance(record, Consumed)}
        self.delivered = self.delivered_before | batches
        if early:  # workers are back before the learner
            for worker in WORKERS:
                self.issue_all(worker)
        self.dead = []  # their tickets are nobody's again, so that their answers would be taken
        self.hello()
        for worker in WORKERS:
            self.buffer.adopt(worker, self.keys(worker), self.now)

    # -- what must hold

    @invariant()
    def every_index_is_what_the_records_say(self) -> None:
        if hasattr(self, "buffer"):
            check_indexes(self.buffer._lives)

    @invariant()
    def slots_are_bounded_and_counted(self) -> None:
        if not hasattr(self, "buffer"):
            return
        if not self.disturbed:
            assert self.buffer.charged <= self.buffer.order.capacity
            for worker in WORKERS:
                assert self.buffer.held(worker) == len(self.keys(worker))
        assert self.buffer.bytes == 10 * self.buffer.groups

    def teardown(self) -> None:
        """From any point, one worker that does its work brings the run to its end: no deadlock."""
        if not hasattr(self, "buffer"):
            return
        idle = 0
        while self.position < STEPS:
            self.publish()
            for worker in WORKERS:
                self.server_applies(worker)
            self.time_passes(31.0)
            self.worker_dies("b", excused=False)
            self.worker_dies("c", excused=False)
            self.issue_all("a")
            for key in sorted(self.keys("a")):
                self.answer(key, answer(self.open[key][1], self.servers["a"]))
            self.placeholders()
            idle = 0 if self.train() else idle + 1
            assert idle < 20, "the run does not go on"
        assert sorted(self.trained) == list(range(STEPS))
        self.check_prompts()
        if self.journalled:
            self.check_records()

    @property
    def records(self) -> list[AnyRecord]:
        """All that the journal has."""
        return [each[0] if isinstance(each, tuple) else each for each in (*self.sealed, *self.journal)]

    def check_records(self) -> None:
        """What the journal says that a step trained, it trained: whatever was torn off."""
        contents = Contents()
        for record in self.records:
            contents.add(record)
        assert contents.steps == {step: tuple(self.trained[step]) for step in contents.steps}
        assert contents.unknown.isdisjoint(contents.steps)
        if not self.torn:
            assert sorted(contents.steps) == list(range(STEPS))

    def issue_all(self, worker: str) -> None:
        while (ticket := self.buffer.issue(worker, self.servers[worker], self.now)) is not None:
            self.open[ticket.group_id, ticket.attempt] = worker, ticket
            self.doubtful.discard((ticket.group_id, ticket.attempt))
        self.write()

    def check_prompts(self) -> None:
        """No prompt twice; and, while nothing was filtered or lost, none left out."""
        groups = {group_id: group for step in self.trained.values() for group_id, group in step.items()}
        trained = [(group.task, group.prompt_index) for group in groups.values()]
        assert len(set(trained)) == len(trained), "a prompt was trained twice"
        if self.config.replay.filter.signal:
            return
        ledger = self.buffer.ledger()
        asked = {*trained, *ledger.pending.values()}
        assert asked == {(task, index) for task, end in ledger.cursors.items() for index in range(end)}

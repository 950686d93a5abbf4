"""The buffer under every schedule that hypothesis finds: bound, order, exactly once, slots, progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streamrl.replay.buffer import AttemptsExhausted, Buffer, GroupRefused, State
from streamrl.replay.order import StrictOrder
from streamrl.types import Group, PolicyVersion, Ticket

STEPS = 9
WORKERS = ("a", "b", "c")
LOST_TOO_OFTEN = 10**6
NEW = PolicyVersion(0)
MakeGroup = Callable[..., Group]


class OneSlotTooMany(StrictOrder):
    """The slot formula broken by one, the required version with it: what the test must notice."""

    def __init__(self, groups_per_step: int, slots: int) -> None:
        super().__init__(groups_per_step, slots + 1)


def new_buffer(order: StrictOrder, *, start: PolicyVersion = NEW, attempts: int = LOST_TOO_OFTEN) -> Buffer:
    return Buffer(
        order,
        start=start,
        last_step=start.step + STEPS,
        task="copy",
        seed=1,
        group_timeout=100.0,
        max_attempts=attempts,
    )


def machine(make_group: MakeGroup, order_class: type[StrictOrder]) -> type[RuleBasedStateMachine]:
    """Workers with one server each, a learner and a publisher that does only every k-th version."""

    class Schedule(RuleBasedStateMachine):
        @initialize(
            staleness=st.sampled_from([0, 1, 2, 3, 0.5, 1.25, 1.75, 2.5]),
            groups=st.integers(1, 5),
            start=st.sampled_from([PolicyVersion(0), PolicyVersion(6, 2)]),
            data=st.data(),
        )
        def begin(self, staleness: float, groups: int, start: PolicyVersion, data: st.DataObject) -> None:
            self.staleness, self.groups = staleness, groups
            self.slots = math.floor((staleness + 1) * groups)
            self.interval = data.draw(st.integers(1, self.slots // groups), label="publish interval")
            self.start, self.now = start, 0.0
            self.buffer = new_buffer(order_class(groups, self.slots), start=start)
            self.servers = dict.fromkeys(WORKERS, start)
            self.buffer.acknowledge(start)
            self.open: dict[tuple[int, int], tuple[str, Ticket]] = {}
            self.dead: list[Ticket] = []
            self.accepted: dict[int, PolicyVersion] = {}  # with the version that generated it
            self.trained: list[int] = []
            self.published = start

        @rule(worker=st.sampled_from(WORKERS))
        def issue(self, worker: str) -> None:
            ticket = self.buffer.issue(worker, self.servers[worker], self.now)
            if ticket is None:
                return
            assert self.servers[worker] >= ticket.issued_version
            assert ticket.group_id not in self.accepted
            self.open[ticket.group_id, ticket.attempt] = worker, ticket

        @precondition(lambda self: self.open)
        @rule(data=st.data())
        def complete(self, data: st.DataObject) -> None:
            """The worst case that the ticket allows: every token from its oldest version."""
            key = data.draw(st.sampled_from(sorted(self.open)))
            worker, ticket = self.open.pop(key)
            group = make_group(ticket.group_id, attempt=ticket.attempt, version=ticket.issued_version)
            with pytest.raises(GroupRefused, match="is the ticket of worker"):
                self.buffer.complete("nobody", group, frames=(), size=10)
            self.buffer.complete(worker, group, frames=(), size=10)
            assert ticket.group_id not in self.accepted
            self.accepted[ticket.group_id] = ticket.issued_version
            with pytest.raises(GroupRefused):
                self.buffer.complete(worker, group, frames=(), size=10)

        @precondition(lambda self: self.dead)
        @rule(data=st.data())
        def complete_too_late(self, data: st.DataObject) -> None:
            ticket = data.draw(st.sampled_from(self.dead))
            group = make_group(ticket.group_id, attempt=ticket.attempt, version=ticket.issued_version)
            with pytest.raises(GroupRefused):
                self.buffer.complete(data.draw(st.sampled_from(WORKERS)), group, frames=(), size=10)

        @rule(worker=st.sampled_from(WORKERS))
        def worker_dies(self, worker: str) -> None:
            self._die(self.buffer.release(worker))

        @rule(seconds=st.sampled_from([1.0, 60.0, 101.0]))
        def time_passes(self, seconds: float) -> None:
            self.now += seconds
            self._die(self.buffer.expire(self.now))
            assert all(ticket.deadline > self.now for _, ticket in self.open.values())

        def _die(self, tickets: list[Ticket]) -> None:
            for ticket in tickets:
                del self.open[ticket.group_id, ticket.attempt]
            self.dead += tickets

        @rule()
        def take(self) -> None:
            self._take()

        def _take(self) -> bool:
            step = self.buffer.next_step
            batch = self.buffer.take(step)
            if batch is None:
                return False
            ids = [stored.group_id for stored in batch]
            assert ids == list(range(step * self.groups, (step + 1) * self.groups))
            for group_id in ids:
                age = step - self.accepted[group_id].step
                assert age <= math.ceil(self.staleness), "older than the bound"
            assert not set(ids) & set(self.trained)
            assert self.buffer.take(step) == batch  # a learner that lost it asks again
            self.trained += ids
            return True

        @rule()
        def publish(self) -> None:
            steps = self.buffer.next_step - self.start.step
            self.published = replace(self.start, step=self.start.step + steps - steps % self.interval)

        @rule(worker=st.sampled_from(WORKERS))
        def server_applies(self, worker: str) -> None:
            self.servers[worker] = self.published
            self.buffer.acknowledge(self.published)

        @invariant()
        def slots_are_bounded_and_counted(self) -> None:
            if not hasattr(self, "buffer"):
                return
            assert self.buffer.charged <= self.buffer.order.capacity
            assert self.buffer.groups == len(self.accepted.keys() - set(self.trained))
            assert self.buffer.bytes == 10 * self.buffer.groups
            for worker in WORKERS:
                assert self.buffer.held(worker) == sum(holder == worker for holder, _ in self.open.values())

        def teardown(self) -> None:
            """From any point, one worker that does its work brings the run to its end: no deadlock."""
            if not hasattr(self, "buffer"):
                return
            while self.buffer.next_step < self.start.step + STEPS:
                before = self.buffer.next_step, self.published
                self.publish()
                self.server_applies("a")
                self.worker_dies("b")
                self.worker_dies("c")
                while (ticket := self.buffer.issue("a", self.servers["a"], self.now)) is not None:
                    self.open[ticket.group_id, ticket.attempt] = "a", ticket
                for key in sorted(self.open):
                    worker, ticket = self.open.pop(key)
                    version = ticket.issued_version
                    self.buffer.complete(worker, make_group(key[0], attempt=key[1], version=version), (), 10)
                    self.accepted[key[0]] = version
                assert self._take() or (self.buffer.next_step, self.published) != before
            first = self.start.step * self.groups
            assert self.trained == list(range(first, first + STEPS * self.groups))
            assert self.buffer.issue("a", replace(self.start, step=99), self.now) is None

    return Schedule


SCHEDULES = settings(max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck))


def test_every_schedule_keeps_bound_order_and_slots_trains_each_group_once_and_ends(make_group: MakeGroup) -> None:
    run_state_machine_as_test(machine(make_group, StrictOrder), settings=SCHEDULES)


def test_one_slot_too_many_breaks_the_bound(make_group: MakeGroup) -> None:
    first_failure = settings(SCHEDULES, phases=[Phase.generate], report_multiple_bugs=False, database=None)
    with pytest.raises(AssertionError, match="older than the bound"):
        run_state_machine_as_test(machine(make_group, OneSlotTooMany), settings=first_failure)


def run_steps(make_group: MakeGroup, buffer: Buffer, steps: int, interval: int = 1) -> list[int]:
    """A generator that is always as early as it may be; the staleness of every trained group."""
    ages: list[int] = []
    version = buffer.start
    buffer.acknowledge(version)
    for _ in range(steps):
        while (ticket := buffer.issue("a", version, 0.0)) is not None:
            buffer.complete("a", make_group(ticket.group_id, version=version), (), 1)
            ages.append(ticket.group_id // 4 - version.step)
        assert buffer.take(buffer.next_step) is not None
        if (buffer.next_step - buffer.start.step) % interval == 0:
            version = replace(version, step=buffer.next_step)
            buffer.acknowledge(version)
    return ages


def test_staleness_zero_is_exactly_synchronous(make_group: MakeGroup) -> None:
    assert set(run_steps(make_group, new_buffer(StrictOrder(4, 4)), STEPS)) == {0}


def test_a_fraction_lets_that_share_of_a_step_be_one_older(make_group: MakeGroup) -> None:
    ages = run_steps(make_group, new_buffer(StrictOrder(4, 6)), STEPS)  # S = 0.5
    assert set(ages) == {0, 1}
    assert sum(ages) / len(ages) == pytest.approx(0.5, abs=0.1)


def test_a_publish_interval_keeps_the_same_bound(make_group: MakeGroup) -> None:
    assert max(run_steps(make_group, new_buffer(StrictOrder(4, 12)), STEPS, interval=3)) == 2


def test_a_resume_begins_at_its_step_and_counts_only_its_own_incarnation(make_group: MakeGroup) -> None:
    start = PolicyVersion(20, incarnation=1)
    buffer = new_buffer(StrictOrder(4, 8), start=start)
    assert not buffer.acknowledge(PolicyVersion(30, incarnation=0))
    assert buffer.issue("a", start, 0.0) is None  # no server has the restored weights yet
    assert buffer.acknowledge(start)
    assert buffer.issue("a", PolicyVersion(30, incarnation=0), 0.0) is None  # weights of a lost history
    ticket = buffer.issue("a", start, 0.0)
    assert ticket is not None
    assert (ticket.group_id, ticket.prompt_index, ticket.issued_version) == (80, 80, start)


def test_tokens_older_than_the_ticket_are_refused_and_the_ticket_is_issued_again(make_group: MakeGroup) -> None:
    buffer = new_buffer(StrictOrder(4, 4))
    run_steps(make_group, buffer, 1)
    ticket = buffer.issue("a", PolicyVersion(1), 0.0)
    assert ticket is not None
    with pytest.raises(GroupRefused, match=r"tokens of version 0\.0, at least 1\.0 is required"):
        buffer.complete("a", make_group(4, version=PolicyVersion(0)), (), 1)
    with pytest.raises(GroupRefused, match="attempt 0 is lost"):
        buffer.complete("a", make_group(4, version=PolicyVersion(1)), (), 1)
    again = buffer.issue("b", PolicyVersion(1), 5.0)
    assert again == replace(ticket, attempt=1, deadline=105.0)


def test_the_oldest_lost_ticket_is_issued_again_first(make_group: MakeGroup) -> None:
    buffer = new_buffer(StrictOrder(4, 4))
    buffer.acknowledge(PolicyVersion(0))
    for worker in "abab":
        buffer.issue(worker, PolicyVersion(0), 0.0)
    buffer.release("b")
    buffer.release("a")
    again = [buffer.issue("c", PolicyVersion(0), 0.0) for _ in range(5)]
    assert [ticket and (ticket.group_id, ticket.attempt) for ticket in again] == [(0, 1), (1, 1), (2, 1), (3, 1), None]


def test_a_ticket_that_is_lost_too_often_ends_the_run_with_a_reason() -> None:
    buffer = new_buffer(StrictOrder(4, 4), attempts=2)
    buffer.acknowledge(PolicyVersion(0))
    buffer.issue("a", PolicyVersion(0), 0.0)
    assert [ticket.group_id for ticket in buffer.expire(100.0)] == [0]
    buffer.issue("a", PolicyVersion(0), 100.0)
    with pytest.raises(AttemptsExhausted, match="group 0 was lost 2 times, last because worker a is gone"):
        buffer.release("a")


def test_frames_of_a_batch_are_kept_until_the_next_is_asked_for(make_group: MakeGroup) -> None:
    buffer = new_buffer(StrictOrder(1, 3))
    buffer.acknowledge(PolicyVersion(0))
    for group_id in range(2):
        buffer.issue("a", PolicyVersion(0), 0.0)
        buffer.complete("a", make_group(group_id), (b"header", b"arena"), 11)
    first = buffer.take(0)
    assert first is not None
    assert buffer.take(0) == first
    assert buffer.state(0) is State.CONSUMED
    assert buffer.take(1) is not None
    with pytest.raises(ValueError, match="step 0 was asked for, 2 is next"):
        buffer.take(0)
    buffer.acknowledge(PolicyVersion(1))
    assert buffer.state(0) is None
    assert buffer.charged == 1

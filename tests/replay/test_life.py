"""A group's life follows its table, and every index says what the records say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from replay_schedule import answer, check_indexes, placeholder

from streamrl.config import Config
from streamrl.machine import IllegalTransition
from streamrl.replay.buffer import Buffer, make_buffer
from streamrl.replay.life import LIFE, Event, Phase
from streamrl.replay.lives import Life, Lives
from streamrl.replay.records import Place, Slot
from streamrl.types import PolicyVersion, Ticket

NEW = PolicyVersion(0)
UNRECORDED = {Event.LOSE, Event.EXHAUST, Event.ADOPT}
IN_THE_JOURNAL = {Phase.WAITING, Phase.ISSUED, Phase.COMPLETED, Phase.CONSUMED}


class AnyLife(RuleBasedStateMachine):
    """Every event at every moment: the table decides, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.lives = Lives()
        self.expected: dict[int, Phase] = {}
        self.recorded: dict[int, Phase] = {}

    @rule(group_id=st.integers(0, 5))
    def add(self, group_id: int) -> None:
        if group_id in self.expected:
            return
        self.lives.add(group_id, "copy", group_id)
        self.expected[group_id] = self.recorded[group_id] = Phase.WAITING

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), event=st.sampled_from(Event))
    def happen(self, data: st.DataObject, event: Event) -> None:
        group_id = data.draw(st.sampled_from(sorted(self.expected)))
        life, before = self.lives[group_id], self.expected[group_id]
        after = LIFE.transitions.get((before, event))
        if after is None:
            with pytest.raises(IllegalTransition, match=f"{event.name} is not possible in {before.name}"):
                self.lives.move(life, event)
            return
        assert self.lives.move(life, event) is after
        self.expected[group_id] = after
        if event not in UNRECORDED:
            self.recorded[group_id] = after
        if after is Phase.FORGOTTEN:
            del self.expected[group_id], self.recorded[group_id]

    @precondition(lambda self: self.lives.out)
    @rule(data=st.data(), worker=st.sampled_from(["a", "b"]))
    def hold(self, data: st.DataObject, worker: str) -> None:
        life = self.lives[data.draw(st.sampled_from(sorted(self.lives.out)))]
        if life.holder is None:
            self.lives.hold(life, worker)

    @rule(data=st.data(), event=st.sampled_from([Event.ISSUE, Event.COMPLETE, Event.DROP, Event.CONSUME]))
    def recover(self, data: st.DataObject, event: Event) -> None:
        """A journal may have any record next: what it lacks is assumed."""
        if not self.expected:
            return
        life = self.lives[data.draw(st.sampled_from(sorted(self.expected)))]
        self.lives.assume(life, event)
        self.lives.move(life, event)
        self.expected[life.group_id] = self.recorded[life.group_id] = life.phase

    @rule()
    def restart(self) -> None:
        """What the journal knows is left."""
        slots = [life.slot() for life in self.lives.values()]
        assert all(type(slot) is Slot and slot.phase in IN_THE_JOURNAL for slot in slots)
        quarantined = [slot.group_id for slot in slots if self.recorded[slot.group_id] is Phase.QUARANTINED]
        for slot in slots:
            slot.quarantined = slot.group_id in quarantined
        self.lives = Lives()
        self.lives.load(slots)
        self.expected = dict(self.recorded)

    @invariant()
    def the_records_are_what_happened(self) -> None:
        assert {group_id: life.phase for group_id, life in self.lives.items()} == self.expected
        durable = {group_id: life.recorded for group_id, life in self.lives.items()}
        assert durable == {i: Phase.CONSUMED if p is Phase.QUARANTINED else p for i, p in self.recorded.items()}

    @invariant()
    def every_index_is_what_the_records_say(self) -> None:
        check_indexes(self.lives)


def test_every_order_of_events_follows_the_table_and_keeps_the_indexes() -> None:
    profile = settings(max_examples=200, stateful_step_count=40, database=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(AnyLife, settings=profile)


def test_every_record_of_a_journal_can_follow_every_other_one() -> None:
    for phase in set(Phase) - {Phase.FORGOTTEN}:
        for event in (Event.ISSUE, Event.COMPLETE, Event.DROP, Event.CONSUME):
            reached = phase
            for before in LIFE.path(phase, event):
                reached = LIFE.next(reached, before)
            LIFE.next(reached, event)
    assert LIFE.path(Phase.ISSUED, Event.ISSUE) == (Event.LOSE,), "the journal does not say that a ticket was lost"


def run_of(**replay: Any) -> Buffer:
    config = {"run": {"steps": 9}, "replay": {"groups_per_step": 2, "max_staleness": 1, "lease": 10.0} | replay}
    buffer = make_buffer(Config.model_validate(config))
    buffer.begin(NEW)
    buffer.acknowledge(NEW)
    return buffer


def issue(buffer: Buffer, worker: str = "a", now: float = 0.0) -> Ticket:
    ticket = buffer.issue(worker, NEW, now)
    assert ticket is not None
    return ticket


def drained(buffer: Buffer) -> list[tuple[str, dict[str, Any]]]:
    events = list(buffer.emitted)
    buffer.emitted.clear()
    return events


def told(buffer: Buffer) -> list[tuple[str, Any]]:
    return [
        (name, fields.get("group_ids", fields.get("group_id", fields.get("steps")))) for name, fields in drained(buffer)
    ]


def test_a_lost_group_waits_and_says_why_it_was_lost() -> None:
    buffer = run_of(max_attempts=2)
    issue(buffer)
    buffer.release("a")
    assert buffer.phase(0) is Phase.WAITING
    assert buffer.snapshot().slots[0].phase is Phase.ISSUED, "the journal knows of no loss"
    issue(buffer, "b")
    assert buffer.phase(0) is Phase.ISSUED
    buffer.expire(10.0)
    assert buffer.phase(0) is Phase.EXHAUSTED
    lost = {"group_id": 0, "attempt": 0, "worker": "a", "reason": "its worker is gone"}
    expired = {"group_id": 0, "attempt": 1, "worker": "b", "reason": "its lease is over"}
    exhausted = {"group_id": 0, "attempt": 1, "issues": 2}
    assert drained(buffer) == [("ticket.lost", lost), ("ticket.expired", expired), ("group.exhausted", exhausted)]
    (ticket,) = buffer.exhausted()
    buffer.complete_placeholder(placeholder(ticket), (), 1)
    assert buffer.phase(0) is Phase.COMPLETED


def test_what_is_delivered_again_regenerated_quarantined_and_forgotten_is_told() -> None:
    buffer = run_of()
    for step in range(2):
        for _ in range(2):
            ticket = issue(buffer)
            buffer.complete("a", answer(ticket, NEW), (b"", b""), 1)
            buffer.placed(ticket.group_id, Place(0, ticket.group_id))
        assert buffer.pop(step) is not None
    assert told(buffer) == []
    buffer.quarantine(1, 3, 0, "it fails")
    assert buffer.phase(3) is Phase.QUARANTINED
    buffer.lose(1, [2])
    assert (buffer.phase(2), buffer.phase(3)) == (Phase.WAITING, Phase.COMPLETED)
    assert told(buffer) == [("groups.returned", [2, 3]), ("group.regenerated", 2)]
    again = issue(buffer)
    buffer.complete("a", answer(again, NEW), (b"", b""), 1)
    assert buffer.pop(1) is not None
    assert (buffer.phase(2), buffer.phase(3)) == (Phase.CONSUMED, Phase.QUARANTINED)
    buffer.saved(2)
    assert told(buffer) == [("groups.forgotten", [0, 1])]
    assert buffer.phase(3) is None


def test_a_dropped_group_and_an_adopted_ticket_are_told() -> None:
    buffer = run_of(filter={"signal": True})
    ticket = issue(buffer)
    assert buffer.complete("a", answer(ticket, NEW, (1.0, 1.0)), (), 1) is None
    (dropped,) = drained(buffer)
    fields = {"worker": "a", "group_id": 0, "attempt": 0, "tokens": 2, "reason": "no signal"}
    assert dropped == ("group.dropped", fields)
    issue(buffer)
    recovered = run_of(filter={"signal": True})
    recovered.restore(None, [record for record in buffer.drain() if type(record).__name__ != "Began"])
    assert recovered.held("a") == 0
    recovered.adopt("b", [(0, 1)], 5.0)
    assert recovered.held("b") == 1
    assert drained(recovered) == [("ticket.adopted", {"worker": "b", "group_id": 0, "attempt": 1})]


def test_one_record_holds_all_that_is_known_of_a_group() -> None:
    buffer = run_of()
    ticket = issue(buffer, now=3.0)
    (life,) = buffer._lives.values()
    assert (life.out, life.holder, life.since, life.deadline, life.frames) == (ticket, "a", 3.0, 13.0, None)
    buffer.complete("a", answer(ticket, NEW), (b"header", b"arena"), 11)
    assert (life.out, life.holder, life.frames) == (None, None, (b"header", b"arena"))
    assert isinstance(life, Life)

"""Filters, the audit of selection, and the adaptive bound."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_schedule import answer, placeholder

from streamrl.config.replay import AdaptiveConfig, FilterConfig
from streamrl.replay.adaptive import AdaptiveBound
from streamrl.replay.orders.fifo import Fifo
from streamrl.replay.orders.windowed import Windowed
from streamrl.replay.selection import Audit, measure, reason_to_drop
from streamrl.types import Group, PolicyVersion, Ticket

TICKET = Ticket(group_id=0, task="copy", prompt_index=0, seed=1, issued_version=PolicyVersion(0), deadline=1.0)


def group_of(*rewards: float, failed: int = 0) -> Group:
    group = answer(TICKET, PolicyVersion(0), rewards)
    missing = placeholder(TICKET).samples[:1] * failed
    return Group(group_id=0, task="copy", prompt_index=0, samples=(*group.samples, *missing))


@pytest.mark.parametrize(
    ("filters", "group", "reason"),
    [
        ({}, group_of(1, 1), None),
        ({"signal": True}, group_of(0.5, 0.5), "no signal"),
        ({"signal": True}, group_of(0, 1, failed=1), None),
        ({"signal": True}, group_of(1, failed=1), "no signal"),
        ({"placeholders": True}, group_of(0, 1, failed=2), "2 failed samples"),
        ({"min_pass_rate": 0.25}, group_of(1, 0, 0, 0), None),
        ({"min_pass_rate": 0.3}, group_of(1, 0, 0, 0), r"pass rate 0.25 is below 0.3"),
        ({"max_pass_rate": 0.7}, group_of(1, 1, 1, 0), r"pass rate 0.75 is above 0.7"),
        ({"max_pass_rate": 0.7}, group_of(1, 0, failed=2), None),  # of the answered ones
    ],
)
def test_a_filter_drops_a_group_for_a_reason(filters: dict[str, object], group: Group, reason: str | None) -> None:
    assert reason_to_drop(group, measure(group, size=1), FilterConfig.model_validate(filters)) == reason


def test_the_audit_sets_generated_dropped_and_trained_groups_side_by_side() -> None:
    audit = Audit()
    kept, dropped = measure(group_of(1, 0), 1), measure(group_of(1, 1, failed=1), 1)
    for record in (kept, dropped):
        audit.generated.add(record)
    audit.dropped.add(dropped)
    metrics = audit.metrics()
    assert metrics["selection/generated/groups"] == 2
    assert metrics["selection/generated/pass_rate"] == 0.75
    assert metrics["selection/dropped/pass_rate"] == 1.0
    assert metrics["selection/dropped/length"] == 1.0  # tokens of an answer; a placeholder is none
    assert metrics["selection/trained/groups"] == 0
    assert "selection/trained/length" not in metrics
    assert metrics["selection/late_duplicates"] == 0


def test_what_is_measured_is_what_the_group_says() -> None:
    group = group_of(1, 0, 1, failed=1)
    record = measure(group, size=7)
    assert (record.tokens, record.answers, record.size, record.oldest) == (group.tokens, 3, 7, 0)
    assert record.pass_rate == group.pass_rate
    assert measure(placeholder(TICKET), 1).oldest is None


# -- the adaptive bound


def adaptive(highest: float = 2.0, every: int = 1, patience: int = 2, change: float = 0.5) -> AdaptiveBound:
    order = Fifo(4, math.floor((highest + 1) * 4))
    return AdaptiveBound(AdaptiveConfig(enabled=True, patience=patience, change=change), order, highest, every)


def test_the_admitted_staleness_follows_the_effective_sample_size() -> None:
    bound = adaptive()
    admitted = []
    for step, ess in enumerate([0.3] * 6 + [0.65] * 4 + [0.9] * 4):
        bound.record(step, ess)
        admitted.append(bound.staleness)
    assert admitted == [2, 1.5, 1.5, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1, 1, 1.5]
    assert bound.slots == 10
    assert bound.metrics() == {"staleness/admitted": 1.5}


@given(
    ess=st.lists(st.none() | st.floats(0, 1), max_size=60),
    groups=st.integers(1, 6),
    highest=st.sampled_from([0, 0.5, 1, 2.25, 3]),
    data=st.data(),
)
def test_it_never_leaves_what_is_configured_and_never_deadlocks(
    ess: list[float | None], groups: int, highest: float, data: st.DataObject
) -> None:
    slots = math.floor((highest + 1) * groups)
    window = data.draw(st.integers(1, slots - groups + 1))
    order = Windowed(groups, slots - (window - 1), window)
    every = data.draw(st.integers(1, order.capacity // groups))
    bound = AdaptiveBound(AdaptiveConfig(enabled=True, patience=1, change=0.7), order, highest, every)
    for step, value in enumerate(ess):
        bound.record(step, value)
        assert every * groups <= bound.slots <= order.capacity


def test_it_is_off_unless_it_is_asked_for() -> None:
    bound = AdaptiveBound(AdaptiveConfig(), Fifo(4, 12), 2.0)
    for step in range(20):
        bound.record(step, 0.01)
    assert (bound.slots, bound.metrics()) == (12, {})


def test_steps_that_are_trained_again_are_not_heard_twice() -> None:
    bound = adaptive(patience=2)
    for step in (5, 5, 4, 5):
        bound.record(step, 0.1)
    assert bound.staleness == 2.0

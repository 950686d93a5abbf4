"""The staleness bound as arithmetic: the formula against a slow, obvious reference."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from streamrl.config import Config
from streamrl.replay.order import StrictOrder

STALENESS = st.floats(0, 6) | st.integers(0, 6) | st.sampled_from([0.5, 0.25, 1.5, 2.75])
GROUPS = st.integers(1, 40)


def order_of(staleness: float, groups: int) -> StrictOrder:
    return StrictOrder(groups, math.floor((staleness + 1) * groups))


@given(staleness=STALENESS, groups=GROUPS, group_id=st.integers(0, 2000))
def test_the_required_step_is_the_first_that_admits_the_group(staleness: float, groups: int, group_id: int) -> None:
    order = order_of(staleness, groups)
    first = next(step for step in range(group_id + 1) if order.admit(group_id, step))
    assert order.required_step(group_id) == first


@given(staleness=STALENESS, groups=GROUPS, group_id=st.integers(0, 2000))
def test_no_group_is_trained_older_than_the_bound(staleness: float, groups: int, group_id: int) -> None:
    order = order_of(staleness, groups)
    age = group_id // groups - order.required_step(group_id)
    assert 0 <= age <= order.worst_staleness <= math.ceil(staleness)


@given(staleness=STALENESS, groups=GROUPS)
def test_the_bound_is_reached_and_its_mean_is_at_most_the_fraction(staleness: float, groups: int) -> None:
    order = order_of(staleness, groups)
    step = order.capacity  # late enough for every group to have waited for weights
    ids = order.select(step, range(10**9))
    assert ids is not None
    ages = [step - order.required_step(group_id) for group_id in ids]
    assert max(ages) == order.worst_staleness
    assert sum(ages) / groups == pytest.approx(order.capacity / groups - 1)
    assert sum(ages) / groups <= staleness + 1e-9


@given(staleness=STALENESS, groups=GROUPS, interval=st.integers(1, 8))
def test_a_publish_interval_goes_through_exactly_when_its_groups_fit_the_slots(
    staleness: float, groups: int, interval: int
) -> None:
    order = order_of(staleness, groups)
    last_needed = interval * groups - 1  # of the steps between version 0 and version k
    assert order.admit(last_needed, acknowledged=0) == (order.capacity >= interval * groups)


def test_zero_staleness_is_synchronous() -> None:
    order = order_of(0, 8)
    assert [order.required_step(group_id) for group_id in (0, 7, 8, 15, 16)] == [0, 0, 1, 1, 2]
    assert order.worst_staleness == 0


def test_the_worked_example_of_the_document() -> None:
    order = StrictOrder(groups_per_step=4, slots=10)  # S = 1.5
    assert order.worst_staleness == 2
    assert [group_id for group_id in range(99) if order.admit(group_id, 3)] == list(range(22))
    assert [5 - order.required_step(group_id) for group_id in (20, 21, 22, 23)] == [2, 2, 1, 1]


def test_slots_that_hold_no_step_are_refused() -> None:
    with pytest.raises(ValueError, match="3 slots for steps of 4 groups"):
        StrictOrder(4, 3)


def test_a_publish_interval_that_would_deadlock_is_refused_by_the_configuration() -> None:
    with pytest.raises(ValidationError, match=r"publish\.every: 3 would deadlock"):
        Config.model_validate({"replay": {"max_staleness": 1}, "publish": {"every": 3}})

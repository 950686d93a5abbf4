"""The staleness bound as arithmetic: each order's formula against random schedules and a slow, obvious reference."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from streamrl.config import Config
from streamrl.config.replay import ReplayConfig
from streamrl.replay.orders import make_order
from streamrl.replay.orders.base import Order
from streamrl.replay.orders.fifo import Fifo
from streamrl.replay.orders.ready import Ready
from streamrl.replay.orders.windowed import Windowed
from streamrl.testing.orders import schedule

STALENESS = st.floats(0, 6) | st.integers(0, 6) | st.sampled_from([0.5, 0.25, 1.5, 2.75])
GROUPS = st.integers(1, 40)


def strict(staleness: float, groups: int) -> Fifo:
    return Fifo(groups, math.floor((staleness + 1) * groups))


def windowed(staleness: float, groups: int, window: int) -> Windowed:
    """With the widest window that leaves the slots of one step, where `window` is wider."""
    slots = math.floor((staleness + 1) * groups)
    window = min(window, slots - groups + 1)
    return Windowed(groups, slots - (window - 1), window)


@given(st.integers(0, 600), GROUPS)
def test_slots_are_those_of_exact_numbers(hundredths: int, groups: int) -> None:
    exact = math.floor((Fraction(hundredths, 100) + 1) * groups)
    replay = ReplayConfig(groups_per_step=groups, max_staleness=hundredths / 100)
    assert replay.slots == exact
    assert make_order(replay).slots_at(hundredths / 100) == exact
    if exact > groups:
        widest = ReplayConfig(
            groups_per_step=groups, max_staleness=hundredths / 100, order="windowed", window=exact - groups + 1
        )
        assert widest.slots == groups


def oldest_trained(order: Order, interval: int, stragglers: float, seed: int) -> int:
    """The largest age in a run that is always as early as it may be, with groups that take their time at random."""
    return max(step.oldest for step in schedule(order, interval, stragglers, seed))


@given(staleness=STALENESS, groups=GROUPS, group_id=st.integers(0, 2000))
def test_the_required_step_is_the_first_that_admits_the_group(staleness: float, groups: int, group_id: int) -> None:
    order = strict(staleness, groups)
    first = next(step for step in range(group_id + 1) if order.admit(group_id, step))
    assert order.required_step(group_id) == first


@given(staleness=STALENESS, groups=GROUPS, group_id=st.integers(0, 2000))
def test_no_group_in_strict_order_is_trained_older_than_the_bound(staleness: float, groups: int, group_id: int) -> None:
    order = strict(staleness, groups)
    age = group_id // groups - order.required_step(group_id)
    assert 0 <= age <= order.worst_staleness <= math.ceil(staleness)


@given(staleness=STALENESS, groups=GROUPS)
def test_the_strict_bound_is_reached_and_its_mean_is_at_most_the_fraction(staleness: float, groups: int) -> None:
    order = strict(staleness, groups)
    step = order.capacity  # late enough for every group to have waited for weights
    first = order.first(step)
    ids = order.select(step, dict.fromkeys(range(first, first + groups)), below=first, above=())
    assert ids == tuple(range(first, first + groups))
    ages = [step - order.required_step(group_id) for group_id in ids]
    assert max(ages) == order.worst_staleness
    assert sum(ages) / groups == pytest.approx(order.capacity / groups - 1)
    assert sum(ages) / groups <= staleness + 1e-9


@given(staleness=STALENESS, groups=GROUPS, interval=st.integers(1, 8))
def test_a_publish_interval_goes_through_exactly_when_its_groups_fit_the_slots(
    staleness: float, groups: int, interval: int
) -> None:
    order = strict(staleness, groups)
    last_needed = interval * groups - 1  # of the steps between version 0 and version k
    assert order.admit(last_needed, acknowledged=0) == (order.capacity >= interval * groups)


@given(
    staleness=st.sampled_from([0, 0.5, 1, 1.5, 2, 3]),
    groups=st.integers(1, 5),
    window=st.integers(1, 12),
    data=st.data(),
    stragglers=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    seed=st.integers(0, 2**16),
)
def test_no_group_in_the_window_is_trained_older_than_the_bound_and_nothing_deadlocks(
    *, staleness: float, groups: int, window: int, data: st.DataObject, stragglers: float, seed: int
) -> None:
    order = windowed(staleness, groups, window)
    interval = data.draw(st.integers(1, order.capacity // groups))
    assert oldest_trained(order, interval, stragglers, seed) <= order.worst_staleness <= math.ceil(staleness)


def test_the_windowed_bound_is_reached() -> None:
    """W - 1 groups pass the straggler, and it is trained one step later than in the order of ids."""
    order = Windowed(groups_per_step=4, slots=9, window=4)  # S = 2
    ages = [oldest_trained(order, 1, stragglers=0.5, seed=seed) for seed in range(20)]
    assert max(ages) == order.worst_staleness == 2
    assert max(oldest_trained(Fifo(4, 9), 1, 0.5, seed) for seed in range(20)) == 2 == (9 - 1) // 4


def test_a_straggler_is_waited_for_once_the_window_is_used_up() -> None:
    order = Windowed(groups_per_step=4, slots=9, window=4)
    assert order.select(1, dict.fromkeys([5, 6, 7, 8, 9]), below=4, above=()) is None  # 8 is outside of 4..7
    assert order.select(1, dict.fromkeys([4, 5, 6, 7, 8]), below=4, above=()) == (4, 5, 6, 7)


def test_a_window_picks_the_lowest_complete_group_one_by_one() -> None:
    order = Windowed(groups_per_step=4, slots=12, window=3)
    assert order.select(0, dict.fromkeys([5, 2, 1, 0, 3]), below=0, above=()) == (0, 1, 2, 3)
    assert order.select(0, dict.fromkeys([1, 2, 3, 4]), below=0, above=()) is None  # 3 waits for 0
    assert order.select(1, dict.fromkeys([3, 6, 5, 7]), below=3, above={4}) == (3, 5, 6, 7)


def test_completion_order_looks_at_the_age_when_a_group_is_selected() -> None:
    drop = Ready(groups_per_step=2, slots=4, bound=1, drop=True)
    assert (drop.worst_staleness, drop.over_age(3, 2), drop.over_age(3, 1), drop.over_age(3, None)) == (
        1,
        False,
        True,
        False,
    )
    assert drop.required_step(0, step=3) == 2  # what is issued now can still be trained by step 3
    passing = Ready(groups_per_step=2, slots=4, bound=1, drop=False)
    assert (passing.worst_staleness, passing.over_age(9, 1), passing.required_step(0, step=3)) == (None, False, 0)


@given(staleness=STALENESS, groups=GROUPS, step=st.integers(0, 50), data=st.data())
def test_in_completion_order_what_is_needed_next_may_always_be_generated(
    staleness: float, groups: int, step: int, data: st.DataObject
) -> None:
    """No deadlock: the acknowledged weights suffice for every group that the next step can be made of."""
    slots = math.floor((staleness + 1) * groups)
    order = Ready(groups, slots, math.ceil(staleness), drop=True)
    behind = data.draw(st.integers(0, min(step, slots // groups - 1)))  # at most k - 1 steps since the last publish
    acknowledged = step - behind
    last = data.draw(st.integers(0, (step + 1) * groups - 1))
    assert order.admit(last, acknowledged, step)


def test_zero_staleness_is_synchronous() -> None:
    order = make_order(ReplayConfig(order="synchronous", groups_per_step=8, max_staleness=3))
    assert [order.required_step(group_id) for group_id in (0, 7, 8, 15, 16)] == [0, 0, 1, 1, 2]
    assert (order.capacity, order.worst_staleness) == (8, 0)


def test_the_worked_examples_of_the_document() -> None:
    order = Fifo(groups_per_step=4, slots=10)  # S = 1.5
    assert order.worst_staleness == 2
    assert [group_id for group_id in range(99) if order.admit(group_id, 3)] == list(range(22))
    assert [5 - order.required_step(group_id) for group_id in (20, 21, 22, 23)] == [2, 2, 1, 1]
    config = ReplayConfig(order="windowed", window=4, groups_per_step=4, max_staleness=2)
    wide = make_order(config)
    assert (wide.capacity, wide.worst_staleness) == (9, 2)
    assert wide.admit(8, 0)
    assert not wide.admit(9, 0)
    assert [(8 + 4 - 1) // 4 - wide.required_step(8), 8 // 4] == [2, 2]


def test_what_would_deadlock_is_refused_when_it_is_built() -> None:
    with pytest.raises(ValueError, match="3 slots for steps of 4 groups"):
        Fifo(4, 3)
    with pytest.raises(ValueError, match="a window of 0 ids"):
        Windowed(4, 8, 0)
    with pytest.raises(ValueError, match="12 slots of steps of 4 groups can be older than 1 steps"):
        Ready(4, 12, bound=1, drop=True)
    with pytest.raises(ValueError, match="16 slots would deadlock: 24 groups train before a publish"):
        make_order(ReplayConfig(groups_per_step=8, max_staleness=1), publish_every=3)


@pytest.mark.parametrize(
    ("replay", "every", "words"),
    [
        ({"max_staleness": 1}, 3, r"publish\.every: 3 would deadlock"),
        ({"max_staleness": 3, "order": "synchronous"}, 2, r"publish\.every: 2 would deadlock"),
        ({"max_staleness": 1, "order": "windowed", "window": 10}, 1, r"window: 10 leaves 7 slots"),
    ],
)
def test_what_would_deadlock_is_refused_by_the_configuration(replay: dict[str, object], every: int, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Config.model_validate({"replay": replay, "publish": {"every": every}})

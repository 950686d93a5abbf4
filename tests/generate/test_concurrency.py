"""How many groups at once the KV cache bears."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.generate.concurrency import PATIENCE, ROOM, Concurrency


def test_it_doubles_until_the_cache_is_full_once_and_then_feels_its_way():
    concurrency = Concurrency(least=2, most=64)
    assert [concurrency.record(0.1, 0, concurrency.capacity) for _ in range(4)] == [4, 8, 16, 32]
    assert concurrency.record(0.95, 0, 32) == 25
    assert [concurrency.record(0.5, 0, concurrency.capacity) for _ in range(PATIENCE + 2)] == [25] * PATIENCE + [26, 27]
    assert concurrency.record(0.5, 1, 27) == 21  # a request without a place is pressure at any usage


def test_it_grows_only_with_what_is_used_and_only_while_there_is_room():
    concurrency = Concurrency(least=4, most=8)
    assert concurrency.record(0.1, 0, 3) == 4
    assert concurrency.record(ROOM + 0.05, 0, 4) == 4
    assert [concurrency.record(0.1, 0, concurrency.capacity) for _ in range(3)] == [8, 8, 8]


def test_lasting_pressure_shrinks_it_step_by_step_to_its_lower_bound():
    concurrency = Concurrency(least=5, most=20)
    while concurrency.record(0.1, 0, concurrency.capacity) < 20:
        pass
    told = [concurrency.record(1.0, 4, 20) for _ in range(10 * PATIENCE)]
    assert told == sorted(told, reverse=True)
    assert told[: PATIENCE + 2] == [16] * (PATIENCE + 1) + [12]
    assert told[-1] == 5


@given(
    st.integers(1, 9),
    st.integers(0, 30),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.integers(0, 50)), max_size=80),
)
def test_it_never_leaves_its_bounds(least: int, more: int, records: list[tuple[float, int, int]]):
    concurrency = Concurrency(least, least + more)
    assert all(least <= concurrency.record(*each) <= least + more for each in records)


@pytest.mark.parametrize("bounds", [(0, 4), (5, 4)])
def test_bounds_that_are_none_are_refused(bounds: tuple[int, int]):
    with pytest.raises(ValueError, match="1 <= least <= most"):
        Concurrency(*bounds)

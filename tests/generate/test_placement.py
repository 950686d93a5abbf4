"""Which server takes a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.generate.request_placement import Placement

SERVERS = ["server-0-0", "server-0-1", "server-0-2"]


def test_a_group_stays_where_its_prompt_is_and_others_spread_over_the_servers():
    placement = Placement()
    first = [placement.choose(group, SERVERS) for group in range(6)]
    assert first == SERVERS * 2
    assert [placement.choose(group, SERVERS) for group in range(6)] == first
    placement.end(1)
    assert placement.choose(6, SERVERS) == SERVERS[1]


def test_a_group_moves_away_from_a_lost_server_and_does_not_come_back():
    placement = Placement()
    assert placement.choose("g", SERVERS) == SERVERS[0]
    assert placement.choose("g", SERVERS[1:]) == SERVERS[1]
    assert placement.choose("g", SERVERS) == SERVERS[1]
    assert placement.groups(SERVERS[0]) == 0


def test_a_server_that_failed_a_request_is_avoided_where_there_is_another():
    placement = Placement()
    assert placement.choose("g", SERVERS[:2]) == SERVERS[0]
    assert placement.choose("g", SERVERS[:2], avoid=SERVERS[0]) == SERVERS[1]
    assert placement.choose("g", SERVERS[1:2], avoid=SERVERS[1]) == SERVERS[1]
    with pytest.raises(ValueError, match="no server is able"):
        placement.choose("g", [])


@given(st.lists(st.tuples(st.integers(0, 5), st.sets(st.sampled_from(SERVERS)), st.booleans()), max_size=60))
def test_every_group_is_counted_once_and_its_server_is_always_able(steps: list[tuple[int, set[str], bool]]):
    placement, places = Placement(), {}
    for group, able, ends in steps:
        if able and not ends:
            former = places.get(group)
            places[group] = placement.choose(group, able)
            assert places[group] in able
            assert former not in able or places[group] == former
        elif ends:
            placement.end(group)
            places.pop(group, None)
        assert sum(placement.groups(name) for name in SERVERS) == len(places)

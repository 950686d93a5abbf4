"""The time by which peers are late: what of the service's own pauses counts against them."""

from __future__ import annotations

import pytest

from streamrl.replay.peer_time import LOOKS, PeerTime

TICK = 0.2


def test_it_goes_on_with_the_clock_while_the_service_looks_as_usual() -> None:
    time = PeerTime(100.0, lease=30.0)
    for count in range(1, 50):
        assert time.tick(100.0 + TICK * count, emptied=count % 3 == 0) == pytest.approx(100.0 + TICK * count)


def test_a_pause_does_not_count_and_what_came_meanwhile_is_read_first() -> None:
    time = PeerTime(0.0, lease=30.0)
    time.tick(0.2, emptied=True)
    assert time.tick(60.0, emptied=True) == 0.2, "the sockets may not have found yet what has come"
    assert time.catches_up
    assert time.tick(60.1, emptied=False) == 0.2
    assert time.tick(60.3, emptied=True) == pytest.approx(0.4)
    assert not time.catches_up
    assert time.tick(60.4, emptied=True) == pytest.approx(0.5)


def test_a_flood_and_a_slow_disk_do_not_stop_it() -> None:
    flooded, slow = PeerTime(0.0, lease=30.0), PeerTime(0.0, lease=30.0)
    flooded.tick(10.0, emptied=False)
    for count in range(LOOKS + 100):
        flooded.tick(10.0 + 0.1 * count, emptied=False)
    assert flooded.now > 5.0
    for count in range(1, 100):  # each look takes longer than a pause
        slow.tick(1.5 * count, emptied=True)
    assert slow.now > 0.3 * 1.5 * 99


def test_a_lease_that_is_shorter_than_the_wait_for_a_message_still_ends() -> None:
    time = PeerTime(0.0, lease=0.1)
    for count in range(1, 10):
        time.tick(TICK * count, emptied=True)
    assert time.now == pytest.approx(1.8)

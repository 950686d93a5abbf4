"""What connections may cost, decided on counts alone."""

from __future__ import annotations

import pytest

from streamrl.stream.connections import SEALED, Bounds, Connections, Count

BOUNDS = Bounds(strangers=2, handshake=100, welcome=50, unread=1000, unread_in_all=1500, sealed=SEALED)
SHAKEN = 100  # bytes of a handshake


@pytest.fixture
def connections() -> Connections:
    return Connections(BOUNDS)


def accepted(connections: Connections, *descriptors: int) -> None:
    for descriptor in descriptors:
        connections.accepted(descriptor, f"peer:{descriptor}")


def look(connections: Connections, counts: dict[int, Count]) -> list[tuple[int, str]]:
    """Each one that is to be cut is closed with the count that it had."""
    cut = connections.poll(counts.__getitem__)
    for descriptor, _ in cut:
        connections.closed(descriptor, counts[descriptor]._replace(queued=0))
    return cut


def brought(size: int, queued: int = 0) -> Count:
    """By a peer that is let in, behind its handshake."""
    return Count(received=SHAKEN + size + queued, queued=queued, answered=51)


def stranger(received: int, answered: int = 50) -> Count:
    return Count(received, 0, answered)


def test_a_stranger_who_sends_more_than_a_handshake_is_cut(connections: Connections) -> None:
    accepted(connections, 5, 6)
    assert look(connections, {5: stranger(101), 6: stranger(100)}) == [
        (5, "101 bytes before its handshake was over; allowed: 100")
    ]
    assert list(connections) == [6]


def test_the_oldest_strangers_make_room_for_new_ones_and_peers_are_none(connections: Connections) -> None:
    accepted(connections, 9, 5, 7, 6)
    counts = dict.fromkeys([9, 5, 7, 6], stranger(0, 10)) | {9: brought(0)}
    assert look(connections, counts) == [(5, "the oldest of 3 without a handshake; allowed: 2")]
    assert list(connections) == [9, 7, 6]
    assert connections.strangers == 3


def test_a_peer_is_let_in_once_and_for_all(connections: Connections) -> None:
    accepted(connections, 5)
    look(connections, {5: brought(0)})
    assert look(connections, {5: brought(900)}) == []


def test_what_the_reader_took_is_not_unread(connections: Connections) -> None:
    accepted(connections, 5)
    look(connections, {5: brought(0)})
    for number in range(1, 10):
        connections.took(5, [865])  # 907 on the wire, with the bytes of CURVE and 9 before it
        assert look(connections, {5: brought(907 * number + 1000)}) == []
    assert connections.unread == 1000
    assert look(connections, {5: brought(907 * 9 + 1001)}) == [(5, "a message or a queue of 1001 bytes; allowed: 1000")]


def test_what_waits_in_the_kernel_is_not_held_by_libzmq(connections: Connections) -> None:
    accepted(connections, 5)
    assert look(connections, {5: brought(1000, queued=5000)}) == []
    assert connections.unread == 1000


def test_small_frames_that_are_read_buy_no_room_for_those_that_are_not(connections: Connections) -> None:
    """A reader that is slower than a flood of small frames: what it took was counted for more than it was."""
    accepted(connections, 5)
    look(connections, {5: brought(0)})
    small = 2 + SEALED + 1
    for number in range(1, 20):
        connections.took(5, [1])
        assert look(connections, {5: brought(small * number + 50 * number)}) == []
        assert connections.unread == 50 * number


def test_the_one_with_most_is_cut_where_all_together_are_too_many(connections: Connections) -> None:
    accepted(connections, 5, 6, 7)
    assert look(connections, {5: brought(500), 6: brought(600), 7: brought(450)}) == [
        (6, "600 of 1550 unread bytes; allowed in all: 1500")
    ]


def test_handshakes_of_many_idle_peers_are_no_unread_messages(connections: Connections) -> None:
    accepted(connections, *range(100))
    assert look(connections, dict.fromkeys(range(100), brought(0))) == []
    assert connections.unread == 0


def test_what_a_closed_connection_left_counts_until_the_reader_has_found_all(connections: Connections) -> None:
    accepted(connections, 5, 6)
    look(connections, {5: brought(0), 6: brought(0)})
    before = connections.left
    connections.closed(5, brought(900, queued=70))  # nobody saw it while it was open
    connections.drained(before)  # of what was there before that
    assert look(connections, {6: brought(700)}) == [(6, "700 of 1600 unread bytes; allowed in all: 1500")]
    connections.drained(connections.left)
    accepted(connections, 7)
    assert look(connections, {7: brought(900)}) == []


def test_nobody_comes_in_while_a_closed_connection_has_left_something(connections: Connections) -> None:
    """Else those who connect again and again add to it each time, and what is read of it counts as theirs."""
    accepted(connections, 5)
    look(connections, {5: brought(0)})
    assert connections.may_come_in
    connections.closed(5, brought(900))
    assert not connections.may_come_in
    accepted(connections, 5)
    look(connections, {5: stranger(90)})
    assert not connections.may_come_in
    connections.took(5, [865])  # of the former one
    connections.drained(connections.left)
    look(connections, {5: stranger(90)})
    assert connections.may_come_in
    assert look(connections, {5: brought(1001)}) != []


def test_nobody_comes_in_while_too_much_is_unread(connections: Connections) -> None:
    accepted(connections, 5, 6)
    look(connections, {5: brought(800), 6: brought(800)})
    assert not connections.may_come_in


def test_strangers_leave_nothing_to_the_reader(connections: Connections) -> None:
    """Else who has no key, and connects often enough, has every peer cut."""
    for _ in range(100):
        accepted(connections, 5)
        look(connections, {5: stranger(90)})
        connections.closed(5, stranger(5000))
    assert connections.left == 0
    assert connections.may_come_in


def test_what_a_cut_connection_left_is_no_message_where_the_reader_waits_for_one(connections: Connections) -> None:
    accepted(connections, 5, 6)
    connections.is_idle = True
    look(connections, {5: brought(1001), 6: brought(1000)})
    assert list(connections) == [6]
    assert look(connections, {6: brought(1000)}) == []
    connections.is_idle = False  # it may have read a message, and be busy with it
    assert look(connections, {6: brought(1000)}) != []

"""What connections may cost, decided on counts alone."""

from __future__ import annotations

import pytest

from streamrl.stream.connections import FRAMED, Bounds, Connections, Count

BOUNDS = Bounds(strangers=2, handshake=100, welcome=50, unread=1000, unread_in_all=1500)
HELLO = Count(received=90, answered=51)


@pytest.fixture
def connections() -> Connections:
    return Connections(BOUNDS)


def accepted(connections: Connections, *descriptors: int) -> None:
    for descriptor in descriptors:
        connections.accepted(descriptor, f"peer:{descriptor}")


def test_a_stranger_who_sends_more_than_a_handshake_is_cut(connections: Connections) -> None:
    accepted(connections, 5, 6)
    cut = connections.look({5: Count(received=101, answered=50), 6: Count(received=100, answered=50)})
    assert cut == [(5, "101 bytes before its handshake was over; allowed: 100")]
    assert list(connections) == [6]


def test_the_oldest_strangers_make_room_for_new_ones_and_peers_are_none(connections: Connections) -> None:
    accepted(connections, 9, 5, 7, 6)
    counts = dict.fromkeys([9, 5, 7, 6], Count(received=0, answered=10))
    counts[9] = HELLO
    assert connections.look(counts) == [(5, "the oldest of 3 without a handshake; allowed: 2")]
    assert list(connections) == [9, 7, 6]
    assert connections.strangers == 3


def test_a_peer_is_let_in_once_and_for_all(connections: Connections) -> None:
    accepted(connections, 5)
    connections.look({5: HELLO})
    assert connections.look({5: Count(received=900, answered=51)}) == []


def test_what_the_reader_took_is_not_unread(connections: Connections) -> None:
    accepted(connections, 5)
    for number in range(1, 10):
        connections.took(5, [900 - FRAMED])
        assert connections.look({5: Count(received=900 * number + 1000, answered=51)}) == []
    assert connections.unread == 1000
    assert connections.look({5: Count(received=900 * 9 + 1001, answered=51)}) == [
        (5, "a message or a queue of 1001 bytes; allowed: 1000")
    ]


def test_what_was_counted_too_much_buys_no_room_for_later(connections: Connections) -> None:
    accepted(connections, 5)
    connections.took(5, [0] * 1000)  # empty frames, of two bytes each on the wire
    assert connections.look({5: Count(received=2000, answered=51)}) == []
    assert connections.look({5: Count(received=3001, answered=51)}) == [
        (5, "a message or a queue of 1001 bytes; allowed: 1000")
    ]


def test_the_one_with_most_is_cut_where_all_together_are_too_many(connections: Connections) -> None:
    accepted(connections, 5, 6, 7)
    counts = {5: Count(500, 51), 6: Count(600, 51), 7: Count(450, 51)}
    assert connections.look(counts) == [(6, "600 of 1550 unread bytes; allowed in all: 1500")]


def test_a_new_connection_with_the_number_of_a_former_one_begins_from_nothing(connections: Connections) -> None:
    accepted(connections, 5)
    connections.took(5, [10_000])
    connections.look({5: Count(9000, 51)})
    accepted(connections, 5)
    assert connections.look({5: Count(1001, 51)}) != []
    connections.took(5, [10])  # of a message that was read late: nobody's
    connections.closed(5)
    connections.closed(5)
    assert len(connections) == 0


def test_what_a_closed_connection_left_counts_until_the_reader_has_found_all(connections: Connections) -> None:
    accepted(connections, 5, 6)
    connections.look({5: Count(900, 51), 6: Count(0, 51)})
    connections.closed(5)
    assert connections.look({6: Count(700, 51)}) == [(6, "700 of 1600 unread bytes; allowed in all: 1500")]
    connections.drained()
    accepted(connections, 7)
    assert connections.look({7: Count(900, 51)}) == []

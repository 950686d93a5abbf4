"""The connections of a listening socket: what they have brought and nobody has read, and which of them are cut.

    accepted ─▶ stranger ──its handshake is over──▶ let in ─▶ closed
                   └─ too many, or too many bytes: cut ◀─┘ too many bytes that nobody has read

libzmq puts a message of many frames together before the reader sees any of it, and its high-water mark counts whole
messages: neither that nor its limit of a frame bounds a message that never ends. So the kernel's count of the bytes
that came on a connection is compared with those of the messages that the reader took from it. The difference is what
libzmq holds. Pure: it is told the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

FRAMED = 128
# bytes that a frame counts for beside its content: more than ZMTP, CURVE and the commands between frames add, so
# that a count never runs ahead of an honest peer; what it counts too much is taken back at the next look.


class Count(NamedTuple):
    """What the kernel tells of one connection, in bytes since it was accepted."""

    received: int  # and taken by libzmq
    answered: int  # and acknowledged by the other end


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much the connections of one socket may cost. All in bytes, but for `strangers`."""

    strangers: int  # connections at a time whose handshake is not over; the oldest ones are cut
    handshake: int  # that a stranger may send
    welcome: int  # that a stranger is told at most; a peer that has been let in was told more
    unread: int  # of one connection
    unread_in_all: int  # of all of them; the one with most is cut


@dataclass(slots=True)
class _Connection:
    peer: str
    taken: int = 0  # by the reader; written by its thread alone
    surplus: int = 0  # of `taken`, which counts generously
    unread: int = 0  # at the last look
    let_in: bool = False


class Connections:
    """Those of one socket, by the descriptor that libzmq has for them.

    >>> connections = Connections(bounds)
    >>> connections.accepted(20, "10.0.0.7:40112")
    >>> connections.took(20, [64, 4096])  # the reader: sizes of a message's frames
    >>> for descriptor, reason in connections.look({20: Count(received=4500, answered=310)}):
    ...     cut(descriptor, reason)
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._connections: dict[int, _Connection] = {}  # in the order in which they came
        self._left_behind = 0  # bytes of connections that are closed, which the reader may still find
        self.unread = 0  # bytes of all of them at the last look
        self.strangers = 0  # at the last look

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._connections))

    def __len__(self) -> int:
        return len(self._connections)

    def peer(self, descriptor: int) -> str:
        """The other end's address, as it was accepted."""
        return self._connections[descriptor].peer

    def accepted(self, descriptor: int, peer: str) -> None:
        """A new connection; one that had the descriptor before is closed."""
        self.closed(descriptor)
        self._connections[descriptor] = _Connection(peer)

    def closed(self, descriptor: int) -> None:
        """May be said twice."""
        connection = self._connections.pop(descriptor, None)
        if connection is not None:
            self._left_behind += connection.unread

    def drained(self) -> None:
        """The reader has everything that was whole. May be called from its thread."""
        self._left_behind = 0

    def took(self, descriptor: int, sizes: Iterable[int]) -> None:
        """The reader has a message with frames of these sizes. May be called from its thread."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.taken += sum(size + FRAMED for size in sizes)

    def look(self, counts: Mapping[int, Count]) -> list[tuple[int, str]]:
        """The connections to cut, with the reason, each one forgotten. `counts` of all that are still there."""
        bounds = self._bounds
        unread: dict[int, int] = {}
        strangers: list[int] = []
        cut: dict[int, str] = {}
        for descriptor, count in counts.items():
            connection = self._connections[descriptor]
            connection.let_in |= count.answered > bounds.welcome
            taken = connection.taken
            connection.surplus = max(connection.surplus, taken - count.received)
            waiting = count.received - taken + connection.surplus
            connection.unread = unread[descriptor] = waiting
            if not connection.let_in and count.received > bounds.handshake:
                cut[descriptor] = f"{count.received} bytes before its handshake was over; allowed: {bounds.handshake}"
            elif waiting > bounds.unread:
                cut[descriptor] = f"a message or a queue of {waiting} bytes; allowed: {bounds.unread}"
            elif not connection.let_in:
                strangers.append(descriptor)
        behind = self._left_behind
        self.strangers, self.unread = len(strangers), behind + sum(unread.values())
        for descriptor in strangers[: max(0, len(strangers) - bounds.strangers)]:
            cut[descriptor] = f"the oldest of {len(strangers)} without a handshake; allowed: {bounds.strangers}"
        left = behind + sum(waiting for descriptor, waiting in unread.items() if descriptor not in cut)
        for descriptor in sorted(unread.keys() - cut.keys(), key=unread.__getitem__, reverse=True):
            if left <= bounds.unread_in_all or not unread[descriptor]:
                break
            cut[descriptor] = f"{unread[descriptor]} of {left} unread bytes; allowed in all: {bounds.unread_in_all}"
            left -= unread[descriptor]
        for descriptor in cut:
            self.closed(descriptor)
        return list(cut.items())

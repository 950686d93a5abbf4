"""The connections of a listening socket: what they have brought and nobody has read, and which of them are cut.

    accepted ─▶ stranger ──its handshake is over──▶ let in ─▶ closed: what it left counts until the reader has found all
                   └─ too many, or too many bytes: cut ◀─┘ too many bytes that nobody has read

libzmq puts a message of many frames together before the reader sees any of it, and its high-water mark counts whole
messages: neither that nor its limit of a frame bounds a message that never ends. So the kernel's count of the bytes
that came on a connection is compared with those of the messages that the reader took from it. The difference is what
libzmq holds. Where that is more than it may, the connections are cut that bring it, and nobody is let in before the
reader has read what is there: a peer that connects again and again would add to it each time. Pure: it is given the
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

# Bytes that CURVE adds to a frame: the command's name, a nonce, a checksum and flags.
SEALED = 33

# Bytes of the longest frame that ZMTP writes with two bytes before it, and not nine.
_SHORT = 255


class Count(NamedTuple):
    """What the kernel tells of one connection, in bytes since it was accepted."""

    received: int  # and taken by libzmq, except for those `queued`
    queued: int  # that libzmq has not taken
    answered: int  # and acknowledged by the other end


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much the connections of one socket may cost. All in bytes, but for `strangers`."""

    strangers: int  # connections at a time whose handshake is not over; the oldest ones are cut
    handshake: int  # that a stranger may send; no more of a peer's bytes are not of messages
    welcome: int  # that a stranger is sent at most; a peer that has been let in was sent more
    unread: int  # of one connection
    unread_in_all: int  # of all of them; the one with most is cut
    sealed: int  # that a frame has on the wire beside its content and its length


@dataclass(slots=True)
class _Connection:
    peer: str
    taken: int = 0  # by the reader; written by its thread alone
    foreign: int = 0  # of `taken`, from a former connection with this descriptor
    let_in: bool = False


class Connections:
    """Those of one socket, by the descriptor that libzmq has for them.

    Usage:
        connections = Connections(bounds)
        connections.accepted(20, "10.0.0.7:40112")
        connections.took(20, [64, 4096])  # the reader: sizes of a message's frames
        for descriptor, reason in connections.poll({20: Count(received=4500, queued=0, answered=310)}.__getitem__):
            cut(descriptor, reason)
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._connections: dict[int, _Connection] = {}  # in the order in which they came
        self._left = 0  # bytes that closed connections have ever left to the reader; written by the door alone
        self._found = 0  # of them, that it has, or that never became whole; written by the reader alone
        self.is_idle = False  # the reader has all that was whole, and waits; written by it alone
        self.may_come_in = True  # strangers may be let in
        self.unread = 0  # bytes of all of them at the last look
        self.strangers = 0  # at the last look

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[int]:
        return iter(tuple(self._connections))

    @property
    def is_pressed(self) -> bool:
        """So much is unread that the pages beside it matter, which malloc keeps."""
        return self.unread > self._bounds.unread_in_all / 8

    def peer(self, descriptor: int) -> str:
        """The other end's address, as it was accepted."""
        return self._connections[descriptor].peer

    def accepted(self, descriptor: int, peer: str) -> None:
        """A new connection."""
        self._connections[descriptor] = _Connection(peer)

    def closed(self, descriptor: int, count: Count) -> None:
        """It brings nothing any more. `count`: its last one, with nothing queued that libzmq may still take.

        What the reader finds of it later might pass for that of a connection with its number, so that nobody is let in
        before the reader has found all.
        """
        connection = self._connections.pop(descriptor)
        if self._is_let_in(connection, count) and (unread := self._unread(connection, count.received - count.queued)):
            self._left += unread
            self.may_come_in = False

    @property
    def left(self) -> int:
        """The argument of `drained`: read it before the last look for a message."""
        return self._left

    def drained(self, left: int) -> None:
        """The reader has everything that was whole when `left` was read. May be called from its thread."""
        self._found = left

    def took(self, descriptor: int, sizes: Iterable[int]) -> None:
        """The reader has a message with frames of these sizes. May be called from its thread."""
        connection = self._connections.get(descriptor)
        if connection is not None:
            connection.taken += sum(map(self._on_wire, sizes))

    def poll(self, count: Callable[[int], Count]) -> list[tuple[int, str]]:
        """The connections to cut, with the reason; `closed` has to be said of each. `count` reads that of one."""
        bounds = self._bounds
        left = self._left - self._found
        unread: dict[int, int] = {}
        strangers: list[int] = []
        cut: dict[int, str] = {}
        for descriptor, connection in self._connections.items():
            taken = connection.taken
            counted = count(descriptor)
            received = counted.received - counted.queued
            if self._is_let_in(connection, counted):
                unread[descriptor] = waiting = self._unread(connection, received)
                if waiting > bounds.unread:
                    cut[descriptor] = f"a message or a queue of {waiting} bytes; allowed: {bounds.unread}"
                continue
            connection.foreign = taken
            if received > bounds.handshake:
                cut[descriptor] = f"{received} bytes before its handshake was over; allowed: {bounds.handshake}"
            else:
                strangers.append(descriptor)
        for descriptor in strangers[: max(0, len(strangers) - bounds.strangers)]:
            cut[descriptor] = f"the oldest of {len(strangers)} without a handshake; allowed: {bounds.strangers}"
        behind = 0 if self.is_idle else left
        self.strangers, self.unread = len(strangers), behind + sum(unread.values())
        self.may_come_in = not left and self.unread <= bounds.unread_in_all
        going_on = behind + sum(waiting for descriptor, waiting in unread.items() if descriptor not in cut)
        for descriptor in sorted(unread.keys() - cut.keys(), key=unread.__getitem__, reverse=True):
            if going_on <= bounds.unread_in_all or not unread[descriptor]:
                break
            cut[descriptor] = f"{unread[descriptor]} of {going_on} unread bytes; allowed in all: {bounds.unread_in_all}"
            going_on -= unread[descriptor]
        return list(cut.items())

    def _is_let_in(self, connection: _Connection, count: Count) -> bool:
        connection.let_in |= count.answered > self._bounds.welcome
        return connection.let_in

    def _unread(self, connection: _Connection, received: int) -> int:
        taken = connection.taken - connection.foreign
        return max(0, received - self._bounds.handshake - taken)

    def _on_wire(self, size: int) -> int:
        """Bytes of a frame at least: a count that runs ahead of the kernel's would hide what comes after it."""
        size += self._bounds.sealed
        return size + (2 if size <= _SHORT else 9)

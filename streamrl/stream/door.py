"""Who comes in at a listening socket, and what those who do may cost: one thread beside libzmq's own.

ZeroMQ asks by ZAP (RFC 27) about every peer whose CURVE handshake is good; whoever does not speak CURVE, or
not to this service's key, fails before that. The socket's monitor tells of both, and of every connection that comes
and goes. Several times a second a look at the kernel's counts says which connections are cut (`stream/connections.py`).
"""

from __future__ import annotations

import array
import fcntl
import logging
import math
import resource
import socket as network
import struct
import termios
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from zmq.utils import z85

from streamrl.stream.connections import Bounds, Connections, Count
from streamrl.stream.keys import ServiceKeys

log = logging.getLogger(__name__)

STRANGERS = 256
# connections without a finished handshake at a time; honest peers take milliseconds for theirs.

HANDSHAKE = 4096
# bytes that a stranger may send; a peer with the longest name needs a quarter of it.

HANDSHAKE_SECONDS = 5.0
# after which libzmq itself closes a stranger.

LOOK = 0.02
# seconds between two looks: what comes in one of them may go beyond a bound. Looks take a tenth of a core at most;
# how long one waits for the interpreter, while the reader is at work, does not put off the next.

EVENTS = 64
# events of the monitor between two looks: as many connections may come beyond `STRANGERS`, and as many as libzmq's
# queue of events holds.

_SPARE = 1 << 20
# bytes that a connection may leave unread beside its messages: commands of ZeroMQ and what it has just read.

_GREETING = 64
_CURVE_WELCOME = 170
_ERROR = 30
# bytes of what ZMTP says to somebody whom it has not let in: its greeting, CURVE's WELCOME, and why it is refused.
# A READY, or a single message, is longer than the last of them.

_ACKNOWLEDGED = struct.Struct("<QQ")
_ACKNOWLEDGED_AT = 120
# where `struct tcp_info` of Linux has tcpi_bytes_acked and tcpi_bytes_received.

_ZAP = "inproc://zeromq.zap.01"  # libzmq's fixed name, one for each context
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = _FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_ACCEPT_FAILED
_EVENT = struct.Struct("=hi")


class Door:
    """Guards one listening socket from its construction until `close`.

    >>> door = Door(context, socket, stream.max_message, stream.unread, service_keys(folder))  # before bind
    >>> door.refused
    0
    """

    def __init__(
        self, context: zmq.Context, socket: zmq.Socket, waiting: int, in_all: int, keys: ServiceKeys | None = None
    ) -> None:
        """Set the socket's keys, if it has some, and watch it in a thread that ends with `context`.

        `waiting`: bytes of an honest peer that may wait to be read, with as much again on the way; `in_all`: that
        all peers together may have sent and nobody has read.
        """
        self.refused = 0  # attempts to connect that were turned away, for want of the run's key
        self.cut: Counter[str] = Counter()  # connections that cost too much, by the bound
        self.connections = Connections(_bounds(waiting, in_all, secured=keys is not None))
        self._socket = socket
        self._welcome = z85.decode(keys.client_public) if keys else b""
        questions = context.socket(zmq.REP)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            questions.bind(_ZAP)
        events = socket.get_monitor_socket(_EVENTS)
        threading.Thread(target=self._serve, args=(questions, events), name="door", daemon=True).start()

    def took(self, frames: list[zmq.Frame]) -> None:
        """The reader has a message of these frames, as it came. Called from its thread."""
        self.connections.took(frames[-1].get(zmq.SRCFD), map(len, frames))

    def drained(self) -> None:
        """The reader finds nothing more to read. Called from its thread."""
        self.connections.drained()

    def close(self) -> None:
        """Before the socket: libzmq waits for whoever listens to its events, so that they have to end first."""
        self._socket.monitor(None, 0)

    def _serve(self, questions: zmq.Socket, events: zmq.Socket) -> None:
        poller = zmq.Poller()
        poller.register(questions, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        due = 0.0
        try:
            while True:
                wait = math.ceil(1000 * max(0.0, due - time.monotonic()))
                ready = dict(poller.poll(wait if self.connections else None))
                if questions in ready:
                    questions.send_multipart(self._answer(questions.recv_multipart()))
                is_crowded = events in ready and self._hear(events)
                if (begun := time.monotonic()) >= due or is_crowded:
                    spent = time.thread_time()
                    self._look()
                    due = begun + max(LOOK, 10 * (time.thread_time() - spent))
        except zmq.ContextTerminated:
            return
        finally:
            questions.close(linger=0)
            events.close(linger=0)

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """ZAP's reply to `[version, id, domain, address, identity, mechanism, key]`."""
        version, request, *_, mechanism, key = question
        known = mechanism == b"CURVE" and key == self._welcome
        status = [b"200", b"OK"] if known else [b"400", b"not a key of this run"]
        return [version, request, *status, b"", b""]

    def _hear(self, events: zmq.Socket) -> bool:
        """What came and went. True: there may be more of it."""
        for _ in range(EVENTS):
            try:
                event, value = _EVENT.unpack(events.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                return False
            if event & _FAILED:
                self._count()
            elif event == zmq.EVENT_ACCEPTED:
                self._accepted(value)
            elif event == zmq.EVENT_ACCEPT_FAILED:
                self._tell("accept", "a connection was not taken, file descriptors have run out")
            else:
                self.connections.closed(value)
        return True

    def _accepted(self, descriptor: int) -> None:
        try:
            with _borrowed(descriptor) as connection:
                self.connections.accepted(descriptor, _peer(connection))
        except OSError:  # it has gone already
            self.connections.closed(descriptor)

    def _count(self) -> None:
        if not self.refused:
            log.warning("a peer without this run's key was turned away; further ones are only counted")
        self.refused += 1

    def _look(self) -> None:
        counts: dict[int, Count] = {}
        for descriptor in self.connections:
            try:
                with _borrowed(descriptor) as connection:
                    counts[descriptor] = _count(connection)
            except OSError:  # libzmq has closed it, and another file may have its number
                self.connections.closed(descriptor)
        peers = {descriptor: self.connections.peer(descriptor) for descriptor in counts}
        for descriptor, reason in self.connections.look(counts):
            try:
                with _borrowed(descriptor) as connection:
                    if _peer(connection) != peers[descriptor]:
                        continue
                    connection.shutdown(network.SHUT_RDWR)
            except OSError:
                continue
            self._tell(reason.rpartition("; ")[2], f"a connection of {peers[descriptor]} was cut: {reason}")

    def _tell(self, kind: str, line: str) -> None:
        if not self.cut[kind]:
            log.warning("%s; further ones are only counted", line)
        self.cut[kind] += 1


def _bounds(waiting: int, in_all: int, *, secured: bool) -> Bounds:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Bounds(
        strangers=STRANGERS if limit == resource.RLIM_INFINITY else min(STRANGERS, limit // 4),
        handshake=HANDSHAKE,
        welcome=_GREETING + (_CURVE_WELCOME + _ERROR if secured else 0),
        unread=2 * waiting + _SPARE,
        unread_in_all=in_all,
    )


@contextmanager
def _borrowed(descriptor: int) -> Iterator[network.socket]:
    """A connection of libzmq's, which stays its own. Raises OSError where it is none any more."""
    connection = network.socket(network.AF_INET, network.SOCK_STREAM, 0, fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _peer(connection: network.socket) -> str:
    name = connection.getpeername()
    return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "this machine"  # a socket file has no name there


def _count(connection: network.socket) -> Count:
    info = connection.getsockopt(network.IPPROTO_TCP, network.TCP_INFO, _ACKNOWLEDGED_AT + _ACKNOWLEDGED.size)
    answered, received = _ACKNOWLEDGED.unpack_from(info, _ACKNOWLEDGED_AT)
    queued = array.array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, queued)
    return Count(received - queued[0], answered)

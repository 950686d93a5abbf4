"""Who comes in at a listening socket, and what those who do may cost: one thread beside libzmq's own.

ZeroMQ asks by ZAP (RFC 27) about every peer whose handshake is good so far, and waits for the answer. A peer that does
not speak CURVE, or not to this service's key, fails before that. The socket's monitor tells of every connection that
comes and goes. Several times a second a look at the kernel's counts says which connections are cut, and whether
anybody may come in (`stream/connections.py`). Where the thread fails, nobody comes in any more, and the reader is
informed.
"""

from __future__ import annotations

import array
import fcntl
import logging
import math
import os
import resource
import socket as network
import struct
import termios
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import zmq
from zmq.utils import z85

from streamrl.stream.arenas import give_pages_back
from streamrl.stream.connections import SEALED, Bounds, Connections, Count
from streamrl.stream.keys import ServiceKeys

log = logging.getLogger(__name__)

# Connections without a finished handshake at a time; honest peers take milliseconds for theirs.
STRANGERS = 256

# Bytes that a stranger may send; a peer with the longest name needs a quarter of it.
HANDSHAKE = 4096

# Seconds after which libzmq itself closes a stranger.
HANDSHAKE_SECONDS = 5.0

# Seconds between two polls: what comes in one of them may exceed a bound. They take a tenth of a core at most; a wait
# for the interpreter, while the reader is at work, does not put off the next.
LOOK = 0.02

# Events of the monitor that are handled at a time, and connections that come between two polls: as many may come beyond
# `STRANGERS`, and as many as wait in the queue of events.
EVENTS = 64

# Events that wait: what libzmq queues for a sender, and EVENTS at this end. Its thread waits where there are more.
QUEUED = 1064

# Bytes that a connection may leave unread beside its messages: commands of ZeroMQ and what it has just read.
_SPARE = 1 << 20

_GREETING = 64
_CURVE_WELCOME = 170

# Bytes of what ZMTP says to somebody whom it has not let in: its greeting, CURVE's WELCOME, and why it is refused. A
# READY, or a single message, is longer than the last of them.
_ERROR = 30

_ACKNOWLEDGED = struct.Struct("<QQ")

# Where `struct tcp_info` of Linux has tcpi_bytes_acked and tcpi_bytes_received.
_ACKNOWLEDGED_AT = 120

# Descriptors that a connection takes: libzmq's, and the door's own. Libzmq's may be another file's at any moment.
_EACH = 2

_ZERO_COPY_RECV = 10  # of zmq.h
_ZAP = "inproc://zeromq.zap.01"  # libzmq's fixed name, one for each context
_DOMAIN = b"run"
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_EVENTS = _FAILED | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPT_FAILED
_EVENT = struct.Struct("=hi")

_TURNED_AWAY = "a peer without this run's key was turned away"
_UNFINISHED = "a connection ended before it had shown this run's key"


class DoorFailed(RuntimeError):
    """Nobody guards the socket any more: it has to be closed, or the process that reads it to end."""


def listening_context() -> zmq.Context:
    """One for sockets with a door: what a message takes in memory is bounded by what it took on the wire.

    By default a small frame keeps the whole buffer of 18 KB that it was read into, one for each TCP segment.
    """
    context = zmq.Context()
    context.set(_ZERO_COPY_RECV, 0)
    return context


class Door:
    """Guards one listening socket from its construction until the end of its context.

    Usage:
        context = listening_context()
        socket = context.socket(zmq.ROUTER)
        door = Door(context, socket, stream.max_message, stream.unread, service_keys(folder))  # before bind
        door.refused  # 0
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
        self._own: dict[int, network.socket] = {}  # by libzmq's descriptor, another one of the same connection
        self._logged: set[str] = set()  # lines that the log has
        self._newcomers = 0  # since the last look
        self._failure: Exception | None = None
        self._welcome = (b"CURVE", z85.decode(keys.client_public)) if keys else (b"NULL",)
        questions = context.socket(zmq.ROUTER)
        questions.bind(_ZAP)
        socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_SECONDS * 1000))
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody comes in unasked, whatever becomes of the thread
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        events = context.socket(zmq.PAIR)
        events.setsockopt(zmq.RCVHWM, EVENTS)
        address = f"inproc://door-{id(socket)}"
        socket.monitor(address, _EVENTS)
        events.connect(address)
        threading.Thread(target=self._run, args=(questions, events), name="door", daemon=True).start()

    def check(self) -> None:
        """Raises DoorFailed where nobody guards the socket any more."""
        if self._failure is not None:
            raise DoorFailed(f"nobody bounds any more what connections cost: {self._failure!r}") from self._failure

    def took(self, frames: list[zmq.Frame]) -> None:
        """The reader has a message of these frames, as it came. Called from its thread."""
        self.connections.took(frames[-1].get(zmq.SRCFD), map(len, frames))

    def _run(self, questions: zmq.Socket, events: zmq.Socket) -> None:
        try:
            self._serve(questions, events)
        except zmq.ContextTerminated:
            pass
        except Exception as error:  # whatever it is: the reader raises it
            log.debug("the door has failed", exc_info=True)
            self._failure = error
            with suppress(zmq.ContextTerminated):
                while True:  # else libzmq waits for room in its queue of events, and every connection with it
                    events.recv_multipart()
        finally:
            questions.close(linger=0)
            events.close(linger=0)
            for connection in self._own.values():
                connection.close()

    def _serve(self, questions: zmq.Socket, events: zmq.Socket) -> None:
        poller = zmq.Poller()
        poller.register(questions, zmq.POLLIN)
        poller.register(events, zmq.POLLIN)
        asked: deque[tuple[int, list[bytes]]] = deque(maxlen=STRANGERS)  # with the events that were handled before
        handled, due = 0, 0.0
        while True:
            wait = math.ceil(1000 * max(0.0, due - time.monotonic()))
            ready = dict(poller.poll(wait if self.connections or asked else None))
            if questions in ready:
                asked.append((handled, questions.recv_multipart()))
            handled += (new := self._handle(events))
            if (begun := time.monotonic()) >= due or self._newcomers >= EVENTS:
                spent = time.thread_time()
                self._poll()
                if self.connections.is_pressed:
                    give_pages_back()
                due = begun + max(LOOK, 10 * (time.thread_time() - spent))
            # A peer that is let in is one whose connection is watched, and followed nobody whose events still wait.
            while asked and self.connections.may_come_in and (new < EVENTS or handled - asked[0][0] >= QUEUED):
                questions.send_multipart(self._answer(asked.popleft()[1]))

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """ZAP's reply to `[envelope ..., version, id, domain, address, identity, mechanism, key]`."""
        end = question.index(b"") + 1
        version, request, _, _, _, *credentials = question[end:]
        known = tuple(credentials) == self._welcome
        status = [b"200", b"OK"] if known else [b"400", b"not a key of this run"]
        return [*question[:end], version, request, *status, b"", b""]

    def _handle(self, events: zmq.Socket) -> int:
        """What came and went. Returns the number of events; fewer than EVENTS: there are no more."""
        for number in range(EVENTS):
            try:
                head, endpoint = events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return number
            event, value = _EVENT.unpack(head)
            if event & _FAILED:
                self.refused += 1
                self._log(_UNFINISHED if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else _TURNED_AWAY)
            elif event == zmq.EVENT_ACCEPTED:
                self._accepted(value, endpoint.decode())
            elif event == zmq.EVENT_ACCEPT_FAILED:
                self._report("accept", f"a connection was not taken: {os.strerror(value)}")
            elif value in self._own:
                self._closed(value, _count(self._own[value]))
        return EVENTS

    def _accepted(self, descriptor: int, endpoint: str) -> None:
        """Have a descriptor of the connection's own, unless it has gone already."""
        if not endpoint.startswith("tcp://"):
            return  # the kernel counts nothing there
        self._newcomers += 1
        try:
            with _borrowed(descriptor) as connection:
                if _port(connection) != endpoint.rpartition(":")[2]:
                    return  # the number is another file's by now
                peer = _peer(connection)
                try:
                    own = network.socket(fileno=os.dup(descriptor))
                except OSError as error:
                    connection.shutdown(network.SHUT_RDWR)
                    self._report("accept", f"a connection was not taken: {error.strerror}")
                    return
        except OSError:
            return
        if descriptor in self._own:
            self._closed(descriptor, _count(self._own[descriptor]))
        self._own[descriptor] = own
        self.connections.accepted(descriptor, peer)

    def _closed(self, descriptor: int, count: Count) -> None:
        self.connections.closed(descriptor, count)
        self._own.pop(descriptor).close()

    def _poll(self) -> None:
        self._newcomers = 0
        for descriptor, reason in self.connections.poll(lambda descriptor: _count(self._own[descriptor])):
            peer, connection = self.connections.peer(descriptor), self._own[descriptor]
            with suppress(OSError):  # the other end was faster
                connection.shutdown(network.SHUT_RDWR)
            self._closed(descriptor, _count(connection)._replace(queued=0))  # libzmq takes what has come
            self._report(reason.rpartition("; ")[2], f"a connection of {peer} was cut: {reason}")

    def _report(self, kind: str, line: str) -> None:
        self.cut[kind] += 1
        self._log(kind, line)

    def _log(self, kind: str, line: str = "") -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            log.warning("%s; further ones are only counted", line or kind)


def _bounds(waiting: int, in_all: int, *, secured: bool) -> Bounds:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Bounds(
        strangers=STRANGERS if limit == resource.RLIM_INFINITY else min(STRANGERS, limit // (4 * _EACH)),
        handshake=HANDSHAKE,
        welcome=_GREETING + (_CURVE_WELCOME + _ERROR if secured else 0),
        unread=2 * waiting + _SPARE,
        unread_in_all=in_all,
        sealed=SEALED if secured else 0,
    )


@contextmanager
def _borrowed(descriptor: int) -> Iterator[network.socket]:
    """A connection of libzmq's, which stays its own. Raises OSError where it is none any more."""
    connection = network.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _port(connection: network.socket) -> str:
    """Of this end; empty where it has none."""
    name = connection.getsockname()
    return str(name[1]) if isinstance(name, tuple) else ""


def _peer(connection: network.socket) -> str:
    host, port = connection.getpeername()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _count(connection: network.socket) -> Count:
    info = connection.getsockopt(network.IPPROTO_TCP, network.TCP_INFO, _ACKNOWLEDGED_AT + _ACKNOWLEDGED.size)
    answered, received = _ACKNOWLEDGED.unpack_from(info, _ACKNOWLEDGED_AT)
    queued = array.array("i", [0])
    fcntl.ioctl(connection, termios.FIONREAD, queued)
    return Count(received, queued[0], answered)

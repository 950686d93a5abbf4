"""Thin shells round ZeroMQ: one Router in the replay service, a Dealer in every process that talks to it.

Nothing is dropped silently and nothing grows without bound:
- a Dealer whose queue is full waits, and after `stream.reply_timeout` says so by `StreamTimeout`; what is
  queued survives a reconnect, because the identity of a peer stays the same;
- the Router never waits for a peer: `send` returns False for one that is gone or has stopped reading, and
  the service treats it as lost;
- a message above `stream.max_message` is refused before it is sent; when a foreign peer sends it, the service drops
  it, and closes the connection where a single frame is above it or libzmq would hold too much of it (`stream/door.py`);
- both ends number their messages, in 8 bytes before the header frame, so that one that was
  lost on the way, or that a peer never took, shows as a gap (`Received.missed`, `Dealer.missed`);
- every TCP connection is encrypted, and only peers with the run's key come in (`stream/keys.py`);
- `close` gives what is queued a second to leave (a Bye, a Stop), then lets go of it.

A socket belongs to the thread, or the event loop, that made it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket as network
import struct
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from streamrl.config.replay import StreamConfig
from streamrl.stream.arenas import COPIED, Arenas, keep_pages
from streamrl.stream.codec import decode_batch, encode_group
from streamrl.stream.door import Door, listening_context
from streamrl.stream.keys import KeysUnusable, client_keys, needs_curve, service_keys
from streamrl.stream.messages import BatchHeader, Buffer, MalformedMessage, Message, decode, encode
from streamrl.types import Batch, Group, Ledger

# Milliseconds: enough for a last message on any network, and too short to be felt at the end of a role.
LINGER = 1000

# Messages that a peer has sent and the network has not taken, or has received and not read.
QUEUE = 64

# No limit of libzmq's for what waits for the service: the door has one, in bytes (`stream/door.py`). An engine of
# libzmq that has to stop reading, and whose connection then ends, aborts the process at its next PING.
SERVICE_UNREAD = 0

# Bytes that CURVE adds to a frame at most, which libzmq counts.
SEALED = 64

# Frames of a message to the service: the header, and the arena of a group.
FRAMES = 2

# Messages that wait for one slow peer of the service, a few bytes each except for the learner's one batch.
SERVICE_QUEUE = 1024

# Seconds between two questions of TCP whether the other end is there; a host that has vanished is noticed after three
# of them. Not those of ZeroMQ, for the reason above.
ALIVE = 10

# Identities whose numbers the service remembers; every process has one. One that is forgotten is seen with a gap.
PEERS = 4096

_FILE = "ipc://"

_NUMBER = struct.Struct("<Q")


class StreamTimeout(TimeoutError):
    """The replay service did not take a message within `stream.reply_timeout`."""


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """A batch as it reached the learner, with the service's `BatchStats` as a dict."""

    batch: Batch
    stats: dict[str, Any]
    ledger: Ledger | None = None


class Received(NamedTuple):
    """What the service received: the frames are views of ZeroMQ's own memory, and keep it alive."""

    peer: bytes  # its identity, the same for the life of its socket
    frames: list[memoryview]
    missed: int  # words of this peer before this one that never came; more than 0 asks for an Introduce
    problem: str = ""  # why the message was dropped: then there are no frames


class _Numbers:
    """Both directions of one connection: the number that is sent next, and the one that should come next."""

    __slots__ = ("_received", "_sent")

    def __init__(self) -> None:
        self._sent = self._received = 0

    def stamp(self, header: Buffer) -> bytes:
        """The header frame behind its number. A message counts as sent even if nobody takes it."""
        self._sent += 1
        return _NUMBER.pack(self._sent - 1) + header

    def strip(self, frame: memoryview) -> tuple[memoryview, int]:
        """The header frame, and how many before it were missed. A lower number: the other end counts from 0 again."""
        if len(frame) < _NUMBER.size:
            return frame[:0], 0  # `decode` refuses it
        number = _NUMBER.unpack_from(frame)[0]
        missed = number - self._received if number >= self._received else number
        self._received = number + 1
        return frame[_NUMBER.size :], missed


def configure(socket: zmq.Socket, stream: StreamConfig) -> None:
    """Everything that both ends share."""
    keep_pages()
    socket.copy_threshold = COPIED
    socket.setsockopt(zmq.LINGER, LINGER)
    socket.setsockopt(zmq.MAXMSGSIZE, stream.max_message + SEALED)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, ALIVE)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, ALIVE)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)
    socket.setsockopt(zmq.TCP_MAXRT, 3000 * ALIVE)  # milliseconds, of what was said and not confirmed


class Router:
    """The service's end: receives from every peer, sends to a peer by its identity, never waits to send."""

    def __init__(self, address: str, stream: StreamConfig, keys: Path | None = None) -> None:
        """Bind `address`; port 0 takes a free one.

        `keys`: the folder of the run's keys, made unless `stream.curve` is off: this socket may need none, and that of
        the `delta` weights some. Raises zmq.ZMQError, naming the address, where binding fails, and KeysUnusable.
        """
        is_secured = needs_curve(stream, address)
        made = service_keys(keys) if is_secured or (keys and stream.curve != "off") else None
        secured = made if is_secured else None
        self._context = listening_context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._stream = stream
        self._door = Door(self._context, self._socket, stream.max_message, stream.unread, secured)
        self._peers: OrderedDict[bytes, _Numbers] = OrderedDict()
        configure(self._socket, stream)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer is an error, not a silent drop
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects takes its identity over
        self._socket.setsockopt(zmq.RCVHWM, SERVICE_UNREAD)
        self._socket.setsockopt(zmq.SNDHWM, SERVICE_QUEUE)
        self._socket.setsockopt(zmq.IPV6, "[" in address)  # else the bound address reads as IPv4 inside IPv6
        try:
            bind(self._socket, address)
        except zmq.ZMQError as error:
            self.close()
            said = f"{error.strerror}; allowed: an address of this machine with a free port (0 takes one)"
            raise zmq.ZMQError(error.errno, f"replay.address {address}: {said}") from error

    @property
    def address(self) -> str:
        """Where the socket listens, with its real port."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def refused(self) -> int:
        """Attempts to connect that were turned away, for want of the run's key."""
        return self._door.refused

    @property
    def cut(self) -> int:
        """Connections that were cut, since they cost more than they may."""
        return sum(self._door.cut.values())

    def receive(self, timeout: float) -> Received | None:
        """A peer's next word; None when nothing came for `timeout` seconds. Raises DoorFailed."""
        identity = wait_for_frame(self._socket, self._door, timeout)
        if identity is None:
            return None
        peer = identity.bytes
        parts, further = read_frames(self._socket, self._door, FRAMES)
        frames = [part.buffer for part in parts]
        size = sum(map(len, frames))
        frames[0], missed = self._numbers(peer).strip(frames[0])
        if further:
            return Received(peer, [], missed, f"{FRAMES + further} frames in one message; allowed: {FRAMES}")
        if size > (most := self._stream.max_message):
            return Received(peer, [], missed, f"a message of {size} bytes, stream.max_message allows {most}")
        return Received(peer, frames, missed)

    def send(self, peer: bytes, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Queue a message and further frames, uncopied. False: the peer is gone or does not read."""
        header = self._numbers(peer).stamp(encode(message))
        try:
            # What is small is sooner copied than lent.
            self._socket.send_multipart([peer, header, *map(_uncopied, frames)], zmq.NOBLOCK, copy=not frames)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _numbers(self, peer: bytes) -> _Numbers:
        numbers = self._peers.get(peer)
        if numbers is None:
            numbers = self._peers[peer] = _Numbers()
            if len(self._peers) > PEERS:
                self._peers.popitem(last=False)
        else:
            self._peers.move_to_end(peer)
        return numbers

    def close(self) -> None:
        """Stop listening; what is queued has `LINGER` to leave. May be called twice."""
        self._socket.close()
        self._context.term()


class Dealer:
    """A peer's end, for a thread, or for asyncio (`on_loop`), which awaits the same by other names.

    Usage:
        dealer = Dealer(address, config.stream, key_folder(config, run_folder), "learner")
        dealer.send(Next(step=7))
        received = dealer.receive(timeout=1.0)  # None, a Message, or a ReceivedBatch
    """

    def __init__(
        self, address: str, stream: StreamConfig, keys: Path | None = None, name: str = "peer", *, on_loop: bool = False
    ) -> None:
        """Connect to the service at `address`, now or as soon as it listens; `name` shows in its log.

        `keys`: the folder of the run's keys. Raises KeysUnusable where CURVE needs them.
        """
        self._stream = stream
        self._context: Any = zmq.asyncio.Context() if on_loop else zmq.Context()
        self._socket = _connected(self._context.socket(zmq.DEALER), address, stream, keys, name)
        self._numbers = _Numbers()
        self._arenas = Arenas()
        self.missed = 0  # words of the service that never came

    def send(self, word: Message | Group) -> None:
        """Queue a message or a group.

        Raises StreamTimeout, or ValueError for a message above `stream.max_message` and for a group that no service
        would accept (`encode_group`).
        """
        frames, lent = self._pack(word)
        with self._in_time():
            self._lend(lent, self._send(frames, track=lent is not None))

    async def send_async(self, word: Message | Group) -> None:
        """As `send`."""
        frames, lent = self._pack(word)
        with self._in_time():
            self._lend(lent, await self._send(frames, track=lent is not None))

    def receive(self, timeout: float) -> Message | ReceivedBatch | None:
        """What the service said; None after `timeout` seconds. Raises MalformedMessage."""
        parts = _waited(self._socket, timeout)
        return None if parts is None else self._read(parts)

    async def receive_async(self, timeout: float) -> Message | ReceivedBatch | None:
        """As `receive`."""
        if not await self._socket.poll(int(timeout * 1000)):
            return None
        return self._read(await self._socket.recv_multipart(copy=False))

    def close(self) -> None:
        """May be called twice; takes `LINGER` at most."""
        self._socket.close()
        self._context.term()

    def _pack(self, word: Message | Group) -> tuple[list[Any], memoryview | None]:
        """The frames of a word, and the arena among them that comes back when it is sent."""
        if isinstance(word, Group):
            header, arena = encode_group(word, self._stream.max_message, self._arenas.allocate)
            return [header, arena], arena if self._arenas.gave(arena) else None
        return [_small(encode(word), self._stream)], None

    def _send(self, frames: list[Any], track: bool = False) -> Any:
        frames[0] = self._numbers.stamp(frames[0])
        return self._socket.send_multipart(frames, copy=False, track=track)

    def _lend(self, arena: memoryview | None, tracker: Any) -> None:
        if arena is not None:
            self._arenas.lend(arena, tracker)

    @contextlib.contextmanager
    def _in_time(self) -> Iterator[None]:
        try:
            yield
        except zmq.Again as error:
            raise StreamTimeout(
                f"the replay service took no message for stream.reply_timeout={self._stream.reply_timeout:g} seconds; "
                "see RUN/logs/replay-0.log"
            ) from error

    def _read(self, parts: list[zmq.Frame]) -> Message | ReceivedBatch:
        """The service's message. A batch brings two frames a group, any other message none."""
        frames = [part.buffer for part in parts]
        header, missed = self._numbers.strip(frames[0])
        self.missed += missed
        message = decode(header)
        if isinstance(message, BatchHeader):
            batch = decode_batch(message, frames[1:])
            return ReceivedBatch(batch, msgspec.structs.asdict(message.stats), message.ledger)
        if len(frames) > 1:
            raise MalformedMessage(f"{len(frames) - 1} frames behind a message that has none")
        return message


def wait_for_frame(socket: zmq.Socket, door: Door, timeout: float) -> zmq.Frame | None:
    """The first frame of the next message; None after `timeout` seconds. Raises DoorFailed."""
    door.check()
    left = door.connections.left
    try:
        return socket.recv(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        door.connections.drained(left)
    if timeout <= 0:
        return None
    socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))  # cheaper than a poll
    door.connections.is_idle = True
    try:
        return socket.recv(copy=False)
    except zmq.Again:
        return None
    finally:
        door.connections.is_idle = False


def read_frames(socket: zmq.Socket, door: Door, most: int) -> tuple[list[zmq.Frame], int]:
    """The frames of a message that has come, at most so many, and the number of further ones, which are dropped."""
    parts, further = [socket.recv(copy=False)], 0
    while len(parts) < most and parts[-1].more:
        parts.append(socket.recv(copy=False))
    door.took(parts)
    last = parts[-1]
    while last.more:  # one at a time: they may be millions
        last = socket.recv(copy=False)
        door.took([last])
        further += 1
    return parts, further


def bind(socket: zmq.Socket, address: str) -> None:
    """Listen at `address`; a socket file is the user's alone. Raises zmq.ZMQError."""
    if is_file := address.startswith(_FILE):
        _refuse_taken(address.removeprefix(_FILE))
    before = os.umask(0o177) if is_file else None
    try:
        socket.bind(address)
    finally:
        if before is not None:
            os.umask(before)


def _refuse_taken(path: str) -> None:
    """libzmq removes the file of a service that listens, where TCP would tell that its port is in use."""
    with network.socket(network.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        except BlockingIOError:
            pass  # somebody does, and has many to accept
        except OSError:
            return  # nobody listens; what else is wrong is said by `bind`
    raise zmq.ZMQError(errno.EADDRINUSE)


def _connected(socket: Any, address: str, stream: StreamConfig, keys: Path | None, name: str) -> Any:
    configure(socket, stream)
    if needs_curve(stream, address):
        try:
            mine = client_keys(keys)
        except KeysUnusable:
            socket.close()  # else the end of its context would wait for it
            raise
        socket.setsockopt(zmq.CURVE_SECRETKEY, mine.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, mine.public)
        socket.setsockopt(zmq.CURVE_SERVERKEY, mine.service_public)
    socket.setsockopt(zmq.IDENTITY, f"{name[:200]}:{uuid.uuid4().hex[:12]}".encode())
    socket.setsockopt(zmq.SNDHWM, QUEUE)
    socket.setsockopt(zmq.RCVHWM, QUEUE)
    socket.setsockopt(zmq.SNDTIMEO, int(stream.reply_timeout * 1000))
    socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)
    return socket


def _small(frame: bytes, stream: StreamConfig) -> bytes:
    if len(frame) + _NUMBER.size > stream.max_message:
        raise ValueError(f"message of {len(frame)} bytes, stream.max_message allows {stream.max_message}")
    return frame


def _waited(socket: zmq.Socket, timeout: float) -> list[zmq.Frame] | None:
    """The frames of the next message; None after `timeout` seconds."""
    socket.setsockopt(zmq.RCVTIMEO, int(timeout * 1000))  # cheaper than a poll before each message
    try:
        frames = [socket.recv(copy=False)]
    except zmq.Again:
        return None
    while frames[-1].more:
        frames.append(socket.recv(copy=False))
    return frames


def _uncopied(frame: Buffer) -> Buffer | zmq.Frame:
    """A frame that came as a whole goes out as the message that it came in: nothing to keep alive, nothing to copy."""
    origin = frame.obj if isinstance(frame, memoryview) else None
    return origin if isinstance(origin, zmq.Frame) and len(origin) == len(frame) else frame

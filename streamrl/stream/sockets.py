"""Thin shells round ZeroMQ: one Router in the replay service, a Dealer in every process that talks to it.

Nothing is dropped silently and nothing grows without bound:
- a Dealer whose queue is full waits, and after `stream.reply_timeout` says so by `StreamTimeout`; what is
  queued survives a reconnect, because the identity of a peer stays the same;
- the Router never waits for a peer: `send` returns False for one that is gone or has stopped reading, and
  the service treats it as lost;
- a frame above `stream.max_message` is refused before it is sent, and closes the connection when a foreign
  peer sends it;
- `close` gives what is queued a second to leave (a Bye, a Stop), then lets go of it.

A socket belongs to the thread, or the event loop, that made it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from streamrl.config import StreamConfig
from streamrl.stream.codec import decode_batch, encode_group
from streamrl.stream.messages import BatchHeader, MalformedMessage, Message, decode, encode
from streamrl.types import Batch, Group

LINGER = 1000
# milliseconds; enough for a last word on any network, and short enough not to be felt at the end of a role.

QUEUE = 64
# messages of one peer in either direction; tickets bound the groups that are under way, this bounds their bytes.

SERVICE_QUEUE = 1024
# messages that wait for one slow peer of the service, a few bytes each except for the learner's one batch.

PING = 10_000
# milliseconds between transport pings; a peer whose host vanished is noticed after three of them.


class StreamTimeout(TimeoutError):
    """The replay service did not take a message within `stream.reply_timeout`."""


@dataclass(frozen=True, slots=True)
class ReceivedBatch:
    """A batch as it reached the learner, with the service's `BatchStats` as a dict."""

    batch: Batch
    stats: dict[str, float]


def configure(socket: zmq.Socket, stream: StreamConfig) -> None:
    """Every option that both ends share. Authentication (CURVE keys) belongs here, before bind and connect."""
    socket.setsockopt(zmq.LINGER, LINGER)
    socket.setsockopt(zmq.MAXMSGSIZE, stream.max_message)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * PING)


class Router:
    """The service's end: receives from every peer, sends to a peer by its identity, never waits to send."""

    def __init__(self, address: str, stream: StreamConfig) -> None:
        """Bind `address`; port 0 takes a free one. Raises zmq.ZMQError, naming the address, where that fails."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, stream)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an unknown peer is an error, not a silent drop
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that reconnects takes its identity over
        self._socket.setsockopt(zmq.RCVHWM, QUEUE)
        self._socket.setsockopt(zmq.SNDHWM, SERVICE_QUEUE)
        self._socket.setsockopt(zmq.IPV6, "[" in address)  # else the bound address reads as IPv4 inside IPv6
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise zmq.ZMQError(error.errno, f"replay.address {address}: {error.strerror}") from error

    @property
    def address(self) -> str:
        """Where the socket listens, with its real port."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, timeout: float) -> tuple[bytes, list[zmq.Frame]] | None:
        """The identity of a peer and its frames, uncopied; None when nothing came for `timeout` seconds."""
        if not self._socket.poll(int(timeout * 1000)):
            return None
        identity, *frames = self._socket.recv_multipart(copy=False)
        return identity.bytes, frames

    def send(self, identity: bytes, message: Message, frames: Sequence[zmq.Frame] = ()) -> bool:
        """Queue a message and further frames as they are. False: the peer is gone or does not read."""
        try:
            self._socket.send_multipart([identity, encode(message), *frames], zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        """Stop listening; what is queued has `LINGER` to leave. May be called twice."""
        self._socket.close()
        self._context.term()


class Dealer:
    """A peer's end for plain threads: the learner and its publisher.

    >>> dealer = Dealer(address, config.stream, "learner")
    >>> dealer.send(Next(step=7))
    >>> received = dealer.receive(timeout=1.0)  # None, a Message, or a ReceivedBatch
    """

    def __init__(self, address: str, stream: StreamConfig, name: str = "peer") -> None:
        """Connect to the service at `address`, now or as soon as it listens; `name` shows in its log."""
        self._stream = stream
        self._context = zmq.Context()
        self._socket = _connected(self._context.socket(zmq.DEALER), address, stream, name)
        self._socket.setsockopt(zmq.SNDTIMEO, int(stream.reply_timeout * 1000))

    def send(self, message: Message) -> None:
        """Raises StreamTimeout, or ValueError for a message above `stream.max_message`."""
        self._send([_small(encode(message), self._stream)])

    def send_group(self, group: Group) -> None:
        """Raises StreamTimeout, or ValueError for a group that no service would accept (`encode_group`)."""
        self._send(encode_group(group, self._stream.max_message))

    def receive(self, timeout: float) -> Message | ReceivedBatch | None:
        """What the service said; None after `timeout` seconds. Raises MalformedMessage."""
        if not self._socket.poll(int(timeout * 1000)):
            return None
        return _read(self._socket.recv_multipart(copy=False))

    def close(self) -> None:
        """May be called twice; takes `LINGER` at most."""
        self._socket.close()
        self._context.term()

    def _send(self, frames: Sequence[Any]) -> None:
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.Again as error:
            raise _timeout(self._stream) from error


class AsyncDealer:
    """A peer's end for asyncio: the generator worker.

    >>> dealer = AsyncDealer(address, config.stream, "generator-0")
    >>> await dealer.send(Hello(role="generator", name="generator-0"))
    >>> message = await dealer.receive(timeout=1.0)
    """

    def __init__(self, address: str, stream: StreamConfig, name: str = "peer") -> None:
        """Connect to the service at `address`, now or as soon as it listens; `name` shows in its log."""
        self._stream = stream
        self._context = zmq.asyncio.Context()
        self._socket = _connected(self._context.socket(zmq.DEALER), address, stream, name)

    async def send(self, message: Message) -> None:
        """Raises StreamTimeout, or ValueError for a message above `stream.max_message`."""
        await self._send([_small(encode(message), self._stream)])

    async def send_group(self, group: Group) -> None:
        """Raises StreamTimeout, or ValueError for a group that no service would accept (`encode_group`)."""
        await self._send(encode_group(group, self._stream.max_message))

    async def receive(self, timeout: float) -> Message | ReceivedBatch | None:
        """What the service said; None after `timeout` seconds. Raises MalformedMessage."""
        if not await self._socket.poll(int(timeout * 1000)):
            return None
        return _read(await self._socket.recv_multipart(copy=False))

    def close(self) -> None:
        """May be called twice; takes `LINGER` at most."""
        self._socket.close()
        self._context.term()

    async def _send(self, frames: Sequence[Any]) -> None:
        try:
            async with asyncio.timeout(self._stream.reply_timeout):
                await self._socket.send_multipart(frames, copy=False)
        except TimeoutError as error:
            raise _timeout(self._stream) from error


def _connected(socket: Any, address: str, stream: StreamConfig, name: str) -> Any:
    configure(socket, stream)
    socket.setsockopt(zmq.IDENTITY, f"{name[:200]}:{uuid.uuid4().hex[:12]}".encode())
    socket.setsockopt(zmq.SNDHWM, QUEUE)
    socket.setsockopt(zmq.RCVHWM, QUEUE)
    socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)
    return socket


def _small(frame: bytes, stream: StreamConfig) -> bytes:
    if len(frame) > stream.max_message:
        raise ValueError(f"message of {len(frame)} bytes, stream.max_message allows {stream.max_message}")
    return frame


def _read(frames: list[zmq.Frame]) -> Message | ReceivedBatch:
    """The service's message. A batch brings two frames a group, any other message none."""
    message = decode(frames[0].buffer)
    if isinstance(message, BatchHeader):
        batch = decode_batch(message, [frame.buffer for frame in frames[1:]])
        return ReceivedBatch(batch, msgspec.structs.asdict(message.stats))
    if len(frames) > 1:
        raise MalformedMessage(f"{len(frames) - 1} frames behind a message that has none")
    return message


def _timeout(stream: StreamConfig) -> StreamTimeout:
    return StreamTimeout(
        f"the replay service took no message for stream.reply_timeout={stream.reply_timeout:g} seconds; "
        "see RUN/logs/replay.log"
    )

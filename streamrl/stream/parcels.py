"""Large runs of bytes from one process to others, asked for piece by piece, over a socket of their own.

    client ─▶ Ask(order, name, offset)      client ◀─ Piece(order, name, offset, total) + bytes
           ─▶ Ask(order): all is here              ◀─ Piece(order): received

The client sets the pace: at most WINDOW pieces are under way to a client, so that nothing queues up and a client that
has gone costs nothing. The socket is encrypted, and only peers with the run's client key come in, as at the replay
service; its own key is made for its lifetime, and published with the address.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from streamrl.config.replay import StreamConfig
from streamrl.stream.door import Door, listening_context
from streamrl.stream.keys import ServiceKeys, client_keys, needs_curve
from streamrl.stream.messages import Buffer, MalformedMessage, parse
from streamrl.stream.sockets import SERVICE_UNREAD, configure, read_frames, wait_for_frame

PIECE = 4 << 20  # bytes; large enough that the question before it costs nothing

WINDOW = 8  # pieces asked for and not yet here: as much as a fast link holds

QUESTION = 1 << 12  # bytes of an Ask at most: the name of a parcel is that of a tensor, or shorter

QUESTIONS = 64  # of one client that wait, some windows of them


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A wish for the piece of parcel `name` at `offset`; an empty name: everything is here."""

    order: int
    name: str = ""
    offset: int = 0


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """The header of a piece. `total`: bytes of the whole parcel; -1: there is no such parcel in this order."""

    order: int
    name: str = ""
    offset: int = 0
    total: int = 0


class ParcelRefused(RuntimeError):
    """The other end has no such parcel, or not any more."""


_ASK = msgspec.msgpack.Decoder(Ask)
_PIECE = msgspec.msgpack.Decoder(Piece)
_ENCODER = msgspec.msgpack.Encoder()


class ParcelServer:
    """The end that has the parcels. One thread; `close` it.

    Usage:
        server = ParcelServer("10.0.0.1", config.stream, key_folder(config, run_folder))
        while not server.serve(order, parcels.get, timeout=0.01):
            check()
    """

    def __init__(self, host: str, stream: StreamConfig, keys: Path | None) -> None:
        """Listen on a free port of `host`. `keys`: the folder of the run's keys. Raises KeysUnusable, zmq.ZMQError."""
        address = f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0"
        self.public_key = ""  # Z85 text, for the clients; empty: not encrypted
        self.sent = 0  # bytes of all pieces
        secured = None
        if needs_curve(stream, address):
            public, secret = zmq.curve_keypair()
            secured = ServiceKeys(secret, client_keys(keys).public)
            self.public_key = public.decode()
        self._context = listening_context()
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, stream)
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._socket.setsockopt(zmq.MAXMSGSIZE, QUESTION)
        self._socket.setsockopt(zmq.RCVHWM, SERVICE_UNREAD)
        self._door = Door(self._context, self._socket, QUESTION * QUESTIONS, stream.unread, secured)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def address(self) -> str:
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def is_closed(self) -> bool:
        return bool(self._socket.closed)

    def serve(self, order: int, find: Callable[[str], Buffer | None], timeout: float) -> bool:
        """Answer what has been asked, waiting `timeout` seconds for the first question. True: `order` is done.

        `find` gives a parcel by its name. Who asks for another order is refused. Raises DoorFailed.
        """
        done = False
        while (identity := wait_for_frame(self._socket, self._door, timeout)) is not None:
            timeout = 0.0
            peer = identity.bytes
            frames, _ = read_frames(self._socket, self._door, 1)
            try:
                ask: Ask = parse(_ASK, frames[0].buffer, "ask")
            except MalformedMessage:
                continue  # not one of ours
            last = ask.order == order and not ask.name
            done |= last
            parcel = b"" if last else find(ask.name) if ask.order == order else None
            self._answer(peer, ask, parcel)
        return done

    def close(self) -> None:
        """May be called twice."""
        self._socket.close()
        self._context.term()

    def _answer(self, peer: bytes, ask: Ask, parcel: Buffer | None) -> None:
        whole = memoryview(parcel).cast("B") if parcel is not None else memoryview(b"")
        piece = whole[ask.offset : ask.offset + PIECE] if ask.offset >= 0 else memoryview(b"")
        header = Piece(ask.order, ask.name, ask.offset, len(whole) if parcel is not None else -1)
        try:  # copied: ZeroMQ may send it after the memory has been written again
            self._socket.send_multipart([peer, _ENCODER.encode(header), piece], zmq.NOBLOCK)
        except zmq.Again:
            return  # it does not read: it asked for more than its window, or has gone
        self.sent += len(piece)


class ParcelClient:
    """The end that asks, in asyncio. `close` it.

    Usage:
        client = ParcelClient(address, server_key, config.stream, key_folder(config, run_folder))
        weights = await client.fetch(order, "7.0/3")
    """

    def __init__(self, address: str, server_key: str, stream: StreamConfig, keys: Path | None) -> None:
        """`server_key`: the server's public key; empty: not encrypted. Raises KeysUnusable, zmq.ZMQError."""
        mine = client_keys(keys) if server_key else None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, stream)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        try:
            if mine is not None:
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, mine.secret)
                self._socket.setsockopt(zmq.CURVE_PUBLICKEY, mine.public)
                self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            self._socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    async def fetch(self, order: int, name: str, into: np.ndarray | None = None) -> np.ndarray:
        """A whole parcel, uint8 [total], in `into` where that is given. Waits as long as it takes.

        Raises ParcelRefused where the server does not have it, where it is not as large as `into`, and for an answer
        that is no piece of it.
        """
        await self._ask(order, name, 0)
        asked, missing = {0}, 1  # offsets, and bytes that are not here; both known after the first piece
        target = into
        upcoming = PIECE
        while missing > 0:
            piece, content = await self._receive()
            if (piece.order, piece.name) != (order, name) or piece.offset not in asked:
                continue  # of a fetch that was given up
            asked.discard(piece.offset)
            if piece.total < 0:
                raise ParcelRefused(f"{name} of order {order} is not to be had any more")
            if piece.offset == 0:
                target = _target(piece, target)
                missing = piece.total
            assert target is not None
            if (piece.total, len(content)) != (len(target), min(PIECE, len(target) - piece.offset)):
                found = f"{len(content)} bytes at {piece.offset} of {piece.total}"
                raise ParcelRefused(f"{found} of {name} are no piece of {len(target)} bytes")
            target[piece.offset : piece.offset + len(content)] = np.frombuffer(content, np.uint8)
            missing -= len(content)
            while upcoming < piece.total and len(asked) < WINDOW:
                await self._ask(order, name, upcoming)
                asked.add(upcoming)
                upcoming += PIECE
        assert target is not None
        return target

    async def done(self, order: int) -> None:
        """Tell the server that nothing of `order` is needed any more, and wait until it has received that."""
        await self.fetch(order, "")

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    async def _ask(self, order: int, name: str, offset: int) -> None:
        await self._socket.send(_ENCODER.encode(Ask(order, name, offset)))

    async def _receive(self) -> tuple[Piece, memoryview]:
        frames = await self._socket.recv_multipart(copy=False)
        if len(frames) != 2:
            raise ParcelRefused(f"an answer of {len(frames)} frames; allowed: 2")
        try:
            return parse(_PIECE, frames[0].buffer, "piece"), frames[1].buffer
        except MalformedMessage as error:
            raise ParcelRefused(str(error)) from error


def _target(piece: Piece, given: np.ndarray | None) -> np.ndarray:
    """Where a parcel goes, now that its size is known."""
    if given is None:
        return np.empty(piece.total, np.uint8)
    if len(given) != piece.total:
        raise ParcelRefused(f"{piece.name} has {piece.total} bytes, announced were {len(given)}")
    return given

"""Parcels: whole and bit for bit over any number of pieces, refused where they are not to be had."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import zmq

from streamrl.config.replay import StreamConfig
from streamrl.stream import parcels
from streamrl.stream.keys import KeysUnusable
from streamrl.stream.parcels import ParcelClient, ParcelRefused, ParcelServer, Piece

ORDER = 7


@pytest.fixture
def server(monkeypatch) -> Iterator[ParcelServer]:
    monkeypatch.setattr(parcels, "PIECE", 1000)
    server = ParcelServer("127.0.0.1", StreamConfig(curve="off"), None)
    yield server
    server.close()


def serve(server: ParcelServer, content: dict[str, bytes], ask: Callable) -> None:
    """Run `ask(client)` while the server answers, until the order is done."""
    done: list[bool] = []
    ending = threading.Event()

    def answer() -> None:
        while not ending.is_set():
            done.append(server.serve(ORDER, content.get, 0.02))

    async def run() -> None:
        client = ParcelClient(server.address, server.public_key, StreamConfig(curve="off"), None)
        try:
            async with asyncio.timeout(60):
                await ask(client)
                assert not any(done)
                await client.done(ORDER)
        finally:
            client.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        asyncio.run(run())
    finally:
        ending.set()
        thread.join()
    assert sum(done) == 1


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 123_456])
def test_a_parcel_arrives_whole_however_many_pieces_it_has(size, server):
    content = {"a": np.random.default_rng(size).bytes(size), "b": b"other"}

    async def ask(client: ParcelClient) -> None:
        target = np.empty(size, np.uint8)
        await client.fetch(ORDER, "a", target)
        assert target.tobytes() == content["a"]
        assert (await client.fetch(ORDER, "b")).tobytes() == b"other"

    serve(server, content, ask)
    assert server.sent == size + 5


def test_what_is_not_to_be_had_is_refused_and_the_next_parcel_comes(server):
    async def ask(client: ParcelClient) -> None:
        with pytest.raises(ParcelRefused, match="c of order 7 is not to be had"):
            await client.fetch(ORDER, "c")
        with pytest.raises(ParcelRefused, match="a of order 6 is not to be had"):
            await client.fetch(ORDER - 1, "a")
        with pytest.raises(ParcelRefused, match="a has 5000 bytes, announced were 4"):
            await client.fetch(ORDER, "a", np.empty(4, np.uint8))
        assert (await client.fetch(ORDER, "a")).tobytes() == bytes(5000)

    serve(server, {"a": bytes(5000)}, ask)


def test_a_fetch_that_was_given_up_does_not_disturb_the_next(server):
    content = {"a": bytes(50_000), "b": np.random.default_rng(0).bytes(50_000)}

    async def ask(client: ParcelClient) -> None:
        for _ in range(5):
            fetching = asyncio.create_task(client.fetch(ORDER, "a"))
            await asyncio.sleep(0)  # asked, and not answered yet
            fetching.cancel()
        assert (await client.fetch(ORDER, "b")).tobytes() == content["b"]

    serve(server, content, ask)


HEAD = msgspec.msgpack.encode(Piece(ORDER, "a", 0, 1500))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ([b"hello"], "an answer of 1 frames; allowed: 2"),
        ([b"\xc1", b""], "piece: "),
        ([HEAD, bytes(1001)], "1001 bytes at 0 of 1500 of a are no piece of 1500 bytes"),
        ([HEAD, b""], "0 bytes at 0 of 1500 of a"),
        ([msgspec.msgpack.encode(Piece(ORDER, "a", 0, -7)), b""], "a of order 7 is not to be had"),
    ],
)
def test_an_answer_that_is_no_piece_is_refused(answer, told, monkeypatch):
    monkeypatch.setattr(parcels, "PIECE", 1000)

    async def ask(address: str) -> None:
        client = ParcelClient(address, "", StreamConfig(curve="off"), None)
        try:
            async with asyncio.timeout(60):
                await client.fetch(ORDER, "a")
        finally:
            client.close()

    def reply() -> None:
        peer, _ = other.recv_multipart()
        other.send_multipart([peer, *answer])

    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        other.setsockopt(zmq.RCVTIMEO, 60_000)
        thread = threading.Thread(target=reply)
        thread.start()
        with pytest.raises(ParcelRefused, match=re.escape(told)):
            asyncio.run(ask(f"tcp://127.0.0.1:{port}"))
        thread.join()


def test_ends_without_usable_keys_leave_no_socket_open(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(zmq.Context, "socket", lambda *_: made.append(True))
    with pytest.raises(KeysUnusable):
        ParcelServer("127.0.0.1", StreamConfig(), tmp_path)
    with pytest.raises(KeysUnusable):
        ParcelClient("tcp://127.0.0.1:1", "k" * 40, StreamConfig(), tmp_path)
    assert not made


def test_words_of_strangers_are_passed_over(server):
    async def ask(client: ParcelClient) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(server.address)
            deep = b"\x94\x01\xa1a\x00" + b"\x91" * 4000
            for word in (b"", b"\xc1", b"\x93\x01\xa1a\xff", b"\x92\x01\xa1\xff", deep, b"hello"):
                stranger.send(word)
        assert (await client.fetch(ORDER, "a")).tobytes() == b"1"

    serve(server, {"a": b"1"}, ask)

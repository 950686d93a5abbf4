"""A peer's line to a service that dies and comes back: the opening words, heartbeats, another address."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from streamrl.config import Config
from streamrl.stream import peer as peer_module
from streamrl.stream.messages import Heartbeat, Hello, Introduce, Message, Next, Stop
from streamrl.stream.peer import Peer
from streamrl.stream.sockets import StreamTimeout
from streamrl.types import PolicyVersion
from tests.scripted_service import WAIT, ScriptedService

ENOUGH = 100_000  # words; more than the queues of a connection hold
HELLO = Hello(run="r", role="learner", name="learner-0", version=PolicyVersion(3))


@pytest.fixture
def config() -> Config:
    return Config.model_validate({"learner": {"tick": 0.1}, "stream": {"reply_timeout": 0.5, "curve": "off"}})


@pytest.fixture
def service(config, tmp_path) -> Iterator[ScriptedService]:
    running = ScriptedService(tmp_path, config.stream)
    yield running
    running.close()


@pytest.fixture
def peer(config, service, tmp_path) -> Iterator[Peer]:
    running = Peer(config, tmp_path, "learner", lambda: [HELLO, Next(step=3)])
    yield running
    running.close()


def listen(peer: Peer, seconds: float) -> None:
    """The peer receives for `seconds`, and sends its heartbeats."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        peer.beat()
        peer.receive(0.02)


def test_the_opening_words_come_first(service, peer):
    assert [service.receive(), service.receive()] == [HELLO, Next(step=3)]


def test_an_introduce_is_answered_by_the_opening_words_and_not_handed_on(service, peer):
    service.receive(), service.receive()
    time.sleep(0.1)  # the interval in which a second opening is no answer
    service.send(Introduce())
    assert peer.receive(WAIT) is None
    assert [service.receive(), service.receive()] == [HELLO, Next(step=3)]


def test_opening_words_that_the_connection_does_not_take_are_said_on_a_new_one(service, peer, monkeypatch):
    """libzmq gives a connection up for ever on which spoilt bytes came: what is sent on it only waits."""
    service.receive(), service.receive()
    former = service.peer
    time.sleep(0.1)  # as above
    service.send(Introduce())

    def takes_nothing(message: Message) -> None:
        raise StreamTimeout("nothing was taken in 0.5 s")

    monkeypatch.setattr(peer._dealer, "send", takes_nothing)
    assert peer.receive(WAIT) is None
    assert [service.receive(), service.receive()] == [HELLO, Next(step=3)]
    assert service.peer != former
    service.send(Stop(reason="heard"))
    assert isinstance(peer.receive(WAIT), Stop)


def test_many_introduces_at_once_are_answered_once(service, peer, monkeypatch):
    service.receive(), service.receive()
    at_once = time.monotonic() + 1.0
    monkeypatch.setattr(peer_module, "time", SimpleNamespace(monotonic=lambda: at_once))
    for _ in range(20):
        service.send(Introduce())
    for _ in range(20):
        assert peer.receive(WAIT) is None
    assert [service.receive(), service.receive()] == [HELLO, Next(step=3)]
    assert service.expect_nothing(0.3)


def test_a_gap_in_the_words_of_the_service_is_answered_by_the_opening_words(service, peer):
    service.receive(), service.receive()
    time.sleep(0.1)  # as above
    service.loses(1)
    service.send(Stop(reason="after the gap"))
    assert isinstance(peer.receive(WAIT), Stop)
    assert [service.receive(), service.receive()] == [HELLO, Next(step=3)]


def test_a_service_at_the_same_address_is_greeted_when_it_asks(config, service, peer, tmp_path):
    service.receive(), service.receive()
    address = service.address
    service.close()
    again = ScriptedService(tmp_path, config.stream, address)
    try:
        deadline = time.monotonic() + WAIT
        listen(peer, 0.3)
        assert isinstance(again.receive(), Heartbeat)
        again.send(Introduce())
        words: list[Message] = []
        while HELLO not in words:
            assert time.monotonic() < deadline
            listen(peer, 0.1)
            words.append(again.receive())
    finally:
        again.close()


def test_a_service_at_another_address_is_found_by_its_file(config, service, peer, tmp_path):
    service.receive(), service.receive()
    service.close()
    moved = ScriptedService(tmp_path, config.stream)
    try:
        deadline = time.monotonic() + WAIT
        while peer.address != moved.address:
            assert time.monotonic() < deadline
            listen(peer, 0.1)
        assert [moved.receive(), moved.receive()] == [HELLO, Next(step=3)]
    finally:
        moved.close()


def test_what_a_dead_service_does_not_take_is_said_on_a_new_connection(config, service, peer, tmp_path):
    service.receive(), service.receive()
    service.close()
    moved = ScriptedService(tmp_path, config.stream)
    try:
        last = 3
        # Until the queue is full, and behind it what the kernel took before it told that the other end is gone.
        while peer.address != moved.address:
            assert last < ENOUGH
            last += 1
            peer.send(Next(step=last))
        assert moved.receive() == HELLO
        while moved.receive() != Next(step=last):
            pass
    finally:
        moved.close()

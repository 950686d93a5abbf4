"""The ZeroMQ shells: nothing is dropped silently, nothing hangs."""

from __future__ import annotations

import asyncio
import socket as network
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from streamrl.config import Config
from streamrl.config.replay import StreamConfig
from streamrl.stream.address import address_path, replay_address, write_address
from streamrl.stream.codec import decode_group
from streamrl.stream.messages import BatchHeader, BatchStats, Bye, Credit, MalformedMessage, Next, Stop, decode
from streamrl.stream.sockets import (
    QUEUE,
    SERVICE_QUEUE,
    Dealer,
    ReceivedBatch,
    Router,
    StreamTimeout,
    _uncopied,
)
from streamrl.types import Group, Ledger
from tests.operations_table import documented

STREAM = StreamConfig(max_message=1 << 20, reply_timeout=0.3, curve="off")
MakeGroup = Callable[..., Group]
Connect = Callable[..., Dealer]


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router("tcp://127.0.0.1:0", STREAM)
    yield router
    router.close()


def test_a_message_and_its_answer_over_asyncio(router: Router, make_group: MakeGroup) -> None:
    async def peer() -> object:
        dealer = Dealer(router.address, STREAM, None, "generator-0", on_loop=True)
        try:
            await dealer.send_async(make_group(5))
            while (answer := await dealer.receive_async(timeout=0.05)) is None:
                pass
            return answer
        finally:
            dealer.close()

    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(asyncio.run(peer())))
    thread.start()
    received = router.receive(10.0)
    assert received is not None
    identity, frames, *_ = received
    assert identity.startswith(b"generator-0:")
    assert decode_group(*frames).group_id == 5
    assert router.send(identity, Stop(reason="enough"))
    thread.join(10.0)
    assert answers == [Stop(reason="enough")]


def test_what_is_said_before_the_service_listens_arrives_when_it_does(router: Router, connect: Connect) -> None:
    address = router.address
    router.close()
    dealer = connect(address, STREAM, None, "learner")
    dealer.send(Next(step=3))
    late = Router(address, STREAM)
    try:
        received = late.receive(10.0)
        assert received is not None
        assert decode(received.frames[0]) == Next(step=3)
    finally:
        dealer.close()
        late.close()


def test_a_peer_keeps_its_identity_and_its_messages_when_the_service_comes_back(
    router: Router, connect: Connect
) -> None:
    dealer = connect(router.address, STREAM, None, "learner")
    ends = dealer._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.send(Bye())
    first = router.receive(10.0)
    address = router.address
    router.close()
    ended = ends.poll(10_000)  # what is on the network as a connection ends is lost, and shows as a gap
    dealer._socket.disable_monitor()
    ends.close(0)
    assert ended
    dealer.send(Next(step=4))
    again = Router(address, STREAM)
    try:
        second = again.receive(10.0)
        assert first is not None
        assert second is not None
        assert first.peer == second.peer
        assert decode(second.frames[0]) == Next(step=4)
    finally:
        dealer.close()
        again.close()


def test_sending_to_nobody_waits_its_timeout_and_says_so(connect: Connect) -> None:
    dealer = connect("tcp://127.0.0.1:9", STREAM)
    for _ in range(QUEUE):
        dealer.send(Bye())
    with pytest.raises(StreamTimeout, match=r"stream\.reply_timeout=0\.3 seconds; see RUN/logs/replay-0\.log"):
        dealer.send(Bye())

    async def peer() -> None:
        dealer = Dealer("tcp://127.0.0.1:9", STREAM, on_loop=True)
        for _ in range(QUEUE):
            await dealer.send_async(Bye())
        with pytest.raises(StreamTimeout):
            await dealer.send_async(Bye())
        dealer.close()

    asyncio.run(peer())


def test_the_router_tells_that_a_peer_is_gone_or_does_not_read(router: Router, connect: Connect) -> None:
    assert not router.send(b"nobody", Bye())
    dealer = connect(router.address, STREAM, None, "deaf")
    dealer.send(Bye())
    received = router.receive(10.0)
    assert received is not None
    sent = 0
    while router.send(received.peer, Stop(reason="x" * 4000)):  # until the kernel's buffers and both queues are full
        sent += 1
    assert sent >= SERVICE_QUEUE


def test_both_ends_learn_how_many_words_were_lost(router: Router, connect: Connect) -> None:
    dealer = connect(router.address, STREAM, None, "learner")
    dealer.send(Bye())
    first = router.receive(10.0)
    dealer._numbers.stamp(b"")  # two words that never arrive
    dealer._numbers.stamp(b"")
    dealer.send(Bye())
    second = router.receive(10.0)
    assert first is not None
    assert second is not None
    assert (first.missed, second.missed) == (0, 2)
    router.send(first.peer, Bye())
    router._numbers(first.peer).stamp(b"")
    router.send(first.peer, Bye())
    assert [dealer.receive(10.0), dealer.receive(10.0)] == [Bye(), Bye()]
    assert dealer.missed == 1


def test_a_service_that_was_started_again_misses_what_was_said_to_the_one_before(
    router: Router, connect: Connect
) -> None:
    dealer = connect(router.address, STREAM, None, "learner")
    dealer.send(Bye())
    first = router.receive(10.0)
    assert first is not None
    router.send(first.peer, Bye())
    dealer.receive(10.0)
    address = router.address
    router.close()
    again = Router(address, STREAM)
    dealer.send(Next(step=4))
    second = again.receive(10.0)
    assert second is not None
    assert second.missed == 1
    again.send(second.peer, Bye())
    assert dealer.receive(10.0) == Bye()
    assert dealer.missed == 0  # the new service counts its words from the start
    again.close()


def test_a_header_too_short_for_its_number_is_malformed(router: Router) -> None:
    foreign = zmq.Context.instance().socket(zmq.DEALER)
    foreign.setsockopt(zmq.LINGER, 0)
    foreign.connect(router.address)
    for word in (b"", b"1234567", b"12345678"):
        foreign.send(word)
        received = router.receive(10.0)
        assert received is not None
        with pytest.raises(MalformedMessage):
            decode(received.frames[0])
    foreign.close()


def test_the_service_remembers_a_bounded_number_of_peers(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.stream.sockets.PEERS", 2)
    for index in range(4):
        router.send(b"%d" % index, Bye())
    assert list(router._peers) == [b"2", b"3"]


def test_a_received_frame_is_passed_on_without_a_copy(router: Router, make_group: MakeGroup, connect: Connect) -> None:
    dealer = connect(router.address, STREAM, None, "learner")
    dealer.send(make_group(5, tokens=1000))
    received = router.receive(10.0)
    assert received is not None
    header, arena = received.frames
    assert isinstance(_uncopied(arena), zmq.Frame)
    assert _uncopied(header) is header  # it came behind its number
    assert _uncopied(bytes(arena)) == bytes(arena)
    stats = BatchStats(tokens_generated=0, generator_busy=0, groups=1, bytes=1)
    ledger = Ledger(below=3, cursors={"copy": 4})
    router.send(received.peer, BatchHeader(step=1, groups=1, stats=stats, ledger=ledger), [header, arena])
    reply = dealer.receive(10.0)
    assert isinstance(reply, ReceivedBatch)
    assert reply.batch.groups[0].group_id == 5
    assert reply.ledger == ledger


def test_a_sender_s_memory_is_used_again_and_never_while_it_is_read(make_group: MakeGroup, connect: Connect) -> None:
    stream = StreamConfig(reply_timeout=10.0, curve="off")
    router = Router("tcp://127.0.0.1:0", stream)
    dealer = connect(router.address, stream, None, "generator-0")
    groups = [make_group(index, tokens=80_000) for index in range(20)]  # 1.3 MB each: lent, not copied
    used = set()
    try:
        for index, group in enumerate(groups):
            dealer.send(group)
            used.add(dealer._arenas._lent[-1][1].ctypes.data)
            if index >= 3:  # a few are always under way
                received = router.receive(10.0)
                assert received is not None
                ids = decode_group(*received.frames).samples[0].output_ids
                assert np.array_equal(ids, groups[index - 3].samples[0].output_ids)
    finally:
        dealer.close()
        router.close()
    assert len(used) < len(groups)


def test_the_last_word_leaves_before_the_socket_closes(
    router: Router, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.stream.sockets.LINGER", 20_000)  # milliseconds; it has the time it takes
    dealer = connect(router.address, STREAM, None, "leaving")
    dealer.send(Bye())
    dealer.close()
    dealer.close()
    received = router.receive(10.0)
    assert received is not None
    assert decode(received.frames[0]) == Bye()


def test_a_message_above_the_limit_is_refused_at_the_sender_and_closes_a_foreign_peer(
    router: Router, connect: Connect
) -> None:
    dealer = connect(router.address, STREAM)
    with pytest.raises(ValueError, match=r"stream\.max_message allows 1048576"):
        dealer.send(Stop(reason="x" * (1 << 20)))
    foreign = zmq.Context.instance().socket(zmq.DEALER)
    foreign.setsockopt(zmq.LINGER, 0)
    foreign.connect(router.address)
    foreign.send(b"x" * ((1 << 20) + 1))
    received = router.receive(10.0)
    assert received is not None
    assert received.problem == "a message of 1048577 bytes, stream.max_message allows 1048576"
    foreign.send(b"x" * (2 << 20))
    assert router.receive(0.5) is None
    dealer.send(Credit(capacity=1))  # and the others are served
    assert router.receive(10.0) is not None
    foreign.close()


def test_frames_behind_a_message_that_has_none_are_refused(router: Router, connect: Connect) -> None:
    dealer = connect(router.address, STREAM)
    dealer.send(Bye())
    received = router.receive(10.0)
    assert received is not None
    router.send(received.peer, Bye(), received.frames)
    with pytest.raises(MalformedMessage, match="1 frames behind"):
        dealer.receive(10.0)


@pytest.mark.parametrize("address", ["ipc://{}/replay", "ipc://@{}/replay"])
def test_a_socket_file_that_somebody_listens_at_is_not_taken_away(
    tmp_path: Path, connect: Connect, address: str
) -> None:
    """libzmq would remove it, and two runs would serve each other's peers."""
    here = address.format(tmp_path)
    first = Router(here, STREAM)
    try:
        with pytest.raises(zmq.ZMQError, match=r"replay\.address ipc://.*/replay: Address already in use"):
            Router(here, STREAM)
        connect(here, STREAM).send(Bye())
        assert first.receive(10.0) is not None
    finally:
        first.close()


def test_a_socket_file_that_a_killed_service_has_left_is_used_again(tmp_path: Path, connect: Connect) -> None:
    with network.socket(network.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "replay"))
    router = Router(f"ipc://{tmp_path}/replay", STREAM)
    try:
        connect(f"ipc://{tmp_path}/replay", STREAM).send(Bye())
        assert router.receive(10.0) is not None
    finally:
        router.close()


def test_an_address_that_cannot_be_bound_is_named(router: Router) -> None:
    with pytest.raises(zmq.ZMQError, match=r"replay\.address tcp://127\.0\.0\.1:\d+: Address already in use"):
        Router(router.address, STREAM)


def test_the_address_file_is_waited_for(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"start_timeout": 0.2}})
    with pytest.raises(TimeoutError, match=r"replay\.address in run\.start_timeout=0\.2"):
        replay_address(config, tmp_path)
    told = write_address(tmp_path, "tcp://0.0.0.0:77")
    assert replay_address(config, tmp_path) == told != "tcp://0.0.0.0:77"
    assert [path.name for path in tmp_path.iterdir()] == [address_path(tmp_path).name]


def test_another_name_of_the_service_s_machine_is_told_where_it_has_one(tmp_path: Path) -> None:
    assert write_address(tmp_path, "tcp://0.0.0.0:77", "run-replay-0.run") == "tcp://run-replay-0.run:77"
    assert write_address(tmp_path, "tcp://10.0.0.7:77", "run-replay-0.run") == "tcp://10.0.0.7:77"


def test_a_bound_of_all_unread_bytes_that_two_messages_would_break_is_refused() -> None:
    with pytest.raises(ValueError, match=r"allowed: at least 2097152") as refused:
        StreamConfig(max_message=1 << 20, max_unread=1 << 20)
    documented("max_unread: ... is not enough ...; allowed: at least ...", str(refused.value), 2)
    assert StreamConfig(max_message=1 << 20).unread == 1 << 22

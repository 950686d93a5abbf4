"""What strangers and peers may cost a listening socket: connections, bytes before a handshake, endless messages."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from streamrl.config.replay import StreamConfig
from streamrl.stream import door
from streamrl.stream.door import DoorFailed
from streamrl.stream.keys import client_keys, service_keys
from streamrl.stream.messages import Credit, decode, encode
from streamrl.stream.parcels import ParcelClient, ParcelServer
from streamrl.stream.sockets import Dealer, Router
from tests.operations_table import GOES_ON, documented

Connect = Callable[..., Dealer]
WAIT = 20.0
MESSAGE = 1 << 20
STREAM = StreamConfig(max_message=MESSAGE, max_unread=8 * MESSAGE, reply_timeout=10.0)
OPEN = StreamConfig(max_message=MESSAGE, max_unread=8 * MESSAGE, reply_timeout=10.0, curve="off")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01%s" + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def router(keys: Path) -> Iterator[Router]:
    router = Router("tcp://127.0.0.1:0", STREAM, keys)
    yield router
    router.close()


@pytest.fixture
def open_router() -> Iterator[Router]:
    router = Router("tcp://127.0.0.1:0", OPEN)
    yield router
    router.close()


@pytest.fixture
def raw() -> Iterator[Callable[[Router], socket.socket]]:
    """`raw(router)`: a TCP connection to it, by somebody who has no ZeroMQ."""
    made: list[socket.socket] = []

    def connect(router: Router) -> socket.socket:
        host, port = router.address.removeprefix("tcp://").split(":")
        made.append(socket.create_connection((host, int(port)), timeout=WAIT))
        return made[-1]

    yield connect
    for connection in made:
        connection.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_served(router: Router, connect: Connect, stream: StreamConfig, keys: Path | None) -> bool:
    """A peer with the run's key comes in, and its words are received."""
    dealer = connect(router.address, stream, keys)
    dealer.send(Credit(capacity=1))
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        received = router.receive(0.1)
        if received is not None and not received.problem:
            return decode(received.frames[0]) == Credit(capacity=1)
    return False


def spoken_to(connection: socket.socket) -> socket.socket:
    """Past the handshake of a socket without CURVE: what is said before the other end is ready is an error."""
    connection.sendall(GREETING % b"NULL".ljust(20, b"\0") + READY)
    received = b""
    while b"Identity" not in received:
        received += connection.recv(4096)
    return connection


def pour(connection: socket.socket, chunk: bytes, most: int) -> int:
    """Send it again and again, up to `most` bytes, until the other end hangs up. Returns what was sent."""
    sent = 0
    try:
        while sent < most:
            connection.sendall(chunk)
            sent += len(chunk)
    except OSError:
        pass
    return sent


def test_loopback_is_every_user_s_so_that_it_is_authenticated_by_default(router: Router, connect: Connect) -> None:
    """Without the run's key nothing that is said is read; a socket file has the user's own mode."""
    foreign = connect(router.address, OPEN)
    foreign.send(Credit(capacity=1))
    until(lambda: router.refused)
    assert router.receive(0.1) is None


def test_a_socket_file_is_the_user_s_alone(tmp_path: Path, connect: Connect) -> None:
    router = Router(f"ipc://{tmp_path}/replay", STREAM)
    try:
        assert stat.S_IMODE((tmp_path / "replay").stat().st_mode) == 0o600
        assert is_served(router, connect, STREAM, None)
    finally:
        router.close()


def test_a_stranger_s_frame_is_not_collected(router: Router, keys: Path, connect: Connect, raw: Callable) -> None:
    """libzmq would take in `max_message` bytes of a frame before it sees that this is no handshake."""
    connection = raw(router)
    connection.sendall(GREETING % b"CURVE".ljust(20, b"\0"))
    connection.sendall(b"\x06" + (MESSAGE - 1).to_bytes(8, "big"))
    connection.sendall(bytes(door.HANDSHAKE + 1))  # and no more: only the bound can end it
    begun = time.monotonic()
    assert _is_hung_up_on(connection)
    assert time.monotonic() - begun < door.HANDSHAKE_SECONDS  # which would do it otherwise
    until(lambda: router.cut == 1)
    assert is_served(router, connect, STREAM, keys)


def test_a_stranger_who_says_nothing_is_hung_up_on(
    keys: Path, connect: Connect, raw: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_SECONDS", 0.2)
    router = Router("tcp://127.0.0.1:0", STREAM, keys)
    try:
        assert _is_hung_up_on(raw(router))
    finally:
        router.close()


def test_too_many_strangers_cost_the_oldest_their_place_and_no_peer_its_own(
    keys: Path,
    connect: Connect,
    raw: Callable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(door, "STRANGERS", 8)
    router = Router("tcp://127.0.0.1:0", STREAM, keys)
    try:
        peer = connect(router.address, STREAM, keys, "first")
        peer.send(Credit(capacity=7))
        received = router.receive(WAIT)
        assert received is not None
        for _ in range(40):
            raw(router)
        until(lambda: router.cut >= 32)
        assert router.send(received.peer, Credit(capacity=8))
        assert peer.receive(WAIT) == Credit(capacity=8)
        assert is_served(router, connect, STREAM, keys)  # and a new one comes in, with all places taken
        assert router.cut < 40
        documented(
            "a connection of ... was cut: the oldest of ... without a handshake; allowed: ...", caplog.text, GOES_ON
        )
    finally:
        router.close()


@pytest.mark.parametrize(
    "size", [1 << 16, pytest.param(0, marks=pytest.mark.slow), pytest.param(255, marks=pytest.mark.slow)]
)
def test_a_message_that_never_ends_is_cut_off(
    open_router: Router, connect: Connect, raw: Callable, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    frame = b"\x03" + size.to_bytes(8, "big") + bytes(size)  # a long one, and more follow
    connection = spoken_to(raw(open_router))
    connection.settimeout(3.0)  # nobody reads the router meanwhile: what it was sent before it hung up is in the way
    chunk = frame * max(1, 4096 // len(frame))
    assert pour(connection, chunk, 1000 * MESSAGE) < 1000 * MESSAGE
    assert open_router.receive(0.2) is None
    until(lambda: "was cut" in caplog.text)
    assert open_router.cut == 1
    documented("a connection of ... was cut: a message or a queue of ... bytes; allowed: ...", caplog.text, GOES_ON)
    assert is_served(open_router, connect, OPEN, None)


def test_a_peer_with_the_key_cannot_make_a_message_larger_than_is_allowed_either(
    router: Router, keys: Path, connect: Connect
) -> None:
    """Frames that are allowed each, 300 MB in one message: neither does the service hold it, nor does it read it."""
    mine = client_keys(keys)
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.curve_secretkey, peer.curve_publickey, peer.curve_serverkey = mine.secret, mine.public, mine.service_public
    peer.connect(router.address)
    frame = zmq.Frame(bytes(MESSAGE // 2))
    for _ in range(600):
        peer.send(frame, zmq.SNDMORE, copy=False)
    peer.send(b"")
    highest = 0
    deadline = time.monotonic() + WAIT
    while not router.cut and time.monotonic() < deadline:
        assert router.receive(0.02) is None
        highest = max(highest, router._door.connections.unread)
    assert router.cut
    peer.close(linger=0)
    context.term()
    assert highest < 300 * MESSAGE // 2
    assert is_served(router, connect, STREAM, keys)


def test_a_message_of_too_many_frames_is_dropped_one_frame_at_a_time(open_router: Router, connect: Connect) -> None:
    dealer = connect(open_router.address, OPEN)
    dealer._socket.send_multipart([bytes(8) + encode(Credit(capacity=1)), *[b""] * 5000])
    received = open_router.receive(WAIT)
    assert received is not None
    assert (received.frames, received.problem) == ([], "5001 frames in one message; allowed: 2")
    assert is_served(open_router, connect, OPEN, None)


def test_two_frames_that_are_allowed_each_are_refused_where_they_are_too_much_together(
    open_router: Router, connect: Connect
) -> None:
    dealer = connect(open_router.address, OPEN)
    dealer._socket.send_multipart([bytes(MESSAGE // 2), bytes(MESSAGE // 2 + 1)])
    received = open_router.receive(WAIT)
    assert received is not None
    assert received.problem == f"a message of {MESSAGE + 1} bytes, stream.max_message allows {MESSAGE}"


def test_an_honest_peer_that_nobody_reads_for_a_while_is_not_cut(router: Router, keys: Path, connect: Connect) -> None:
    dealer = connect(router.address, STREAM, keys)
    whole = [bytes(8), bytes(MESSAGE - 8)]
    for _ in range(2):
        dealer._socket.send_multipart(whole)
    until(lambda: router._door.connections.unread > 2 * MESSAGE - door.HANDSHAKE)
    time.sleep(20 * door.LOOK)  # many looks, in which it could be cut
    for number in range(30):
        received = router.receive(WAIT)
        assert received is not None
        assert sum(map(len, received.frames)) == MESSAGE - 8
        if number < 28:
            dealer._socket.send_multipart(whole)
    assert router.cut == 0


def test_all_peers_together_have_a_bound_too(keys: Path, connect: Connect) -> None:
    stream = StreamConfig(max_message=MESSAGE, max_unread=4 * MESSAGE, reply_timeout=10.0)
    router = Router("tcp://127.0.0.1:0", stream, keys)
    try:
        dealers = [connect(router.address, stream, keys, f"w{number}") for number in range(6)]
        for dealer in dealers:
            dealer._socket.send_multipart([bytes(8), bytes(MESSAGE - 100)])
        until(lambda: router.cut >= 1)
        until(lambda: router.receive(0.05) is None and router._door.connections.unread <= 4 * MESSAGE)
    finally:
        router.close()


@pytest.mark.parametrize("is_secured", [True, False])
def test_what_the_reader_took_is_counted_as_it_came_on_the_wire(keys: Path, connect: Connect, is_secured: bool) -> None:
    """Neither more, which would hide what comes later, nor less, which would cut an honest peer in the end."""
    stream = STREAM if is_secured else OPEN
    router = Router("tcp://127.0.0.1:0", stream, keys)
    try:
        dealer = connect(router.address, stream, keys)
        sizes = [1, 33, 220, 222, 223, 255, 256, 8192, 70_000]
        for size in sizes * 20:
            dealer._socket.send_multipart([bytes(8), bytes(size)])
        for _ in sizes * 20:
            assert router.receive(WAIT) is not None
        (connection,) = router._door.connections._connections.values()
        (own,) = router._door._own.values()
        count = door._count(own)
        assert count.queued == 0
        handshake = count.received - connection.taken
        assert 100 < handshake < door.HANDSHAKE
        for _ in range(door.HANDSHAKE):
            dealer._socket.send_multipart([b"", b""])
        for _ in range(door.HANDSHAKE):
            assert router.receive(WAIT) is not None
        assert door._count(own).received - connection.taken == handshake
    finally:
        router.close()


def test_who_connects_again_and_again_to_a_reader_that_does_not_read_adds_nothing(
    router: Router, keys: Path, connect: Connect
) -> None:
    """A peer that was cut comes back with what it still has to say; what it brought before waits to be read."""
    first = connect(router.address, STREAM, keys, "first")
    for _ in range(64):
        first._socket.send_multipart([bytes(8), bytes(MESSAGE // 2)])
    until(lambda: router.cut == 1)
    second = connect(router.address, STREAM, keys, "second")
    second.send(Credit(capacity=1))
    time.sleep(1.0)  # libzmq tries again ten times
    assert router.cut == 1
    senders: list[bytes] = []
    deadline = time.monotonic() + WAIT
    while b"second" not in senders:  # what is there is read: they come in
        assert time.monotonic() < deadline
        if (received := router.receive(0.1)) is not None:
            senders.append(received.peer.partition(b":")[0])
    assert senders[0] == b"first"


def test_a_parcel_server_lets_clients_in_again_when_it_has_read_what_one_has_left(
    keys: Path,
) -> None:
    service_keys(keys)
    server = ParcelServer("127.0.0.1", STREAM, keys)
    try:
        gone = ParcelClient(server.address, server.public_key, STREAM, keys)
        for order in range(500):
            asyncio.run(gone._ask(order, "a", 0))
        until(lambda: server._door.connections.unread > 0)
        gone.close()
        until(lambda: server._door.connections.left > 0)
        client = ParcelClient(server.address, server.public_key, STREAM, keys)
        ending = threading.Event()

        def serve() -> None:
            while not ending.is_set():
                server.serve(1, {"a": b"content"}.get, 0.02)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            fetched = asyncio.run(asyncio.wait_for(client.fetch(1, "a"), WAIT))
        finally:
            ending.set()
            thread.join()
            client.close()
        assert bytes(fetched) == b"content"
    finally:
        server.close()


SMALL = """
import sys, time
from pathlib import Path
import psutil, zmq
from streamrl.config.replay import StreamConfig
from streamrl.stream.door import DoorFailed
from streamrl.stream.keys import client_keys, service_keys
from streamrl.stream.sockets import Router
router = Router("tcp://127.0.0.1:0", StreamConfig(), Path(sys.argv[1]))
mine = client_keys(Path(sys.argv[1]))
peer = zmq.Context().socket(zmq.DEALER)
peer.setsockopt(zmq.LINGER, 0)
peer.curve_secretkey, peer.curve_publickey, peer.curve_serverkey = mine.secret, mine.public, mine.service_public
peer.connect(router.address)
connections = router._door.connections
before = psutil.Process().memory_info().rss
while connections.unread < 500_000:
    peer.send(b"x")
    time.sleep(0)  # for libzmq's thread: each in a segment of its own
print((psutil.Process().memory_info().rss - before) / connections.unread)
"""


def test_a_small_message_takes_no_buffer_of_its_own_in_memory(keys: Path) -> None:
    """libzmq reads into 18 KB, which a message in it keeps: a hundred times of what it took on the wire."""
    done = subprocess.run([sys.executable, "-c", SMALL, str(keys)], capture_output=True, text=True, timeout=120)
    assert float(done.stdout) < 20, done.stderr


HOLES = """
import ctypes
import psutil
from streamrl.stream.arenas import give_pages_back, keep_pages
keep_pages()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(8 << 20) for _ in range(12)]
for block in blocks:
    ctypes.memset(block, 1, 8 << 20)
for block in blocks[::2]:
    libc.free(block)
kept = psutil.Process().memory_info().rss
give_pages_back()
print((kept - psutil.Process().memory_info().rss) >> 20)
"""


def test_pages_between_messages_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) > 40, done.stderr  # of 48 MiB, which malloc has kept


def test_where_much_is_unread_pages_are_given_back_and_only_there(
    router: Router, keys: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(door, "give_pages_back", lambda: given.append(router._door.connections.unread))
    dealer = connect(router.address, STREAM, keys)
    dealer._socket.send_multipart([bytes(8), bytes(MESSAGE // 2)])
    until(lambda: router._door.connections.unread > MESSAGE // 2 - door.HANDSHAKE)
    time.sleep(5 * door.LOOK)  # several looks
    assert not given
    for _ in range(2):
        dealer._socket.send_multipart([bytes(8), bytes(MESSAGE // 2)])
    until(lambda: len(given) > 2)
    while router.receive(0.2) is not None:
        pass
    until(lambda: router._door.connections.unread < MESSAGE)  # a look has seen it
    count = len(given)
    time.sleep(5 * door.LOOK)
    assert len(given) == count
    assert min(given) > MESSAGE


def test_giving_pages_back_takes_a_tenth_of_a_core_at_most(
    router: Router, keys: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost, times = 0.05, 5
    given: list[float] = []

    def burn() -> None:
        given.append(begun := time.thread_time())
        while time.thread_time() < begun + cost:
            pass

    monkeypatch.setattr(door, "give_pages_back", burn)
    dealer = connect(router.address, STREAM, keys)
    begun = time.monotonic()
    for _ in range(3):
        dealer._socket.send_multipart([bytes(8), bytes(MESSAGE // 2)])
    until(lambda: len(given) > times)
    assert time.monotonic() - begun > 10 * cost * times


def test_a_door_that_fails_lets_nobody_in_tells_its_reader_and_holds_up_no_end(
    router: Router, keys: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would make it fail is not known: something is put in its place."""
    peer = connect(router.address, STREAM, keys)
    peer.send(Credit(capacity=1))
    assert router.receive(WAIT) is not None

    def fails() -> None:
        raise RuntimeError("counts that cannot be")

    monkeypatch.setattr(router._door, "_poll", fails)
    with pytest.raises(DoorFailed, match="counts that cannot be"):
        until(lambda: router.receive(0.1))
    monkeypatch.setattr(router._door, "_failure", None)  # a reader that does not care
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.curve_secretkey, stranger.curve_publickey = secret, public
    stranger.curve_serverkey = client_keys(keys).service_public
    stranger.connect(router.address)
    stranger.send(bytes(8) + encode(Credit(capacity=7)))
    peer.send(Credit(capacity=2))
    received = router.receive(WAIT)
    assert received is not None  # the words of a peer inside are received
    assert decode(received.frames[0]) == Credit(capacity=2)
    assert router.receive(0.5) is None
    stranger.close(linger=0)
    context.term()
    ending = threading.Thread(target=router.close, daemon=True)
    ending.start()
    ending.join(WAIT)
    assert not ending.is_alive()


def test_a_file_of_the_process_that_has_the_number_of_a_former_connection_is_left_alone(router: Router) -> None:
    """libzmq tells of a connection that it may have closed meanwhile; the process's own ones may have its number."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as own:
        accepted, _ = listener.accept()
        with accepted:
            own.sendall(bytes(door.HANDSHAKE + 1))  # more than a stranger may say
            for descriptor in (accepted.fileno(), listener.fileno(), os.open(os.devnull, os.O_RDONLY)):
                router._door._accepted(descriptor, router.address)
            assert len(router._door.connections) == 0
            router._door._poll()
            accepted.sendall(b"whole")
            assert own.recv(5) == b"whole"


def test_connections_by_ipv6_have_the_same_bounds(
    keys: Path, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(door, "STRANGERS", 2)
    router = Router("tcp://[::1]:0", STREAM, keys)
    port = int(router.address.rpartition(":")[2])
    strangers = []
    try:
        for _ in range(5):
            strangers.append(socket.create_connection(("::1", port), timeout=WAIT))
        until(lambda: router.cut == 3)
        assert "a connection of [::1]:" in caplog.text
        assert is_served(router, connect, STREAM, keys)
    finally:
        for stranger in strangers:
            stranger.close()
        router.close()


def test_a_connection_for_which_no_descriptor_is_left_is_told_of_and_holds_up_no_end(
    keys: Path, exhaust: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    """libzmq tries to accept it again and again, and fills its queue of events."""
    router = Router("tcp://127.0.0.1:0", STREAM, keys)
    made = [socket.socket() for _ in range(3)]
    host, port = router.address.removeprefix("tcp://").split(":")
    spare = os.open(os.devnull, os.O_RDONLY)
    exhaust()
    os.close(spare)  # libzmq's; for the door's own there is none
    for connection in made:
        connection.settimeout(WAIT)
        connection.connect((host, int(port)))
    try:
        until(lambda: "a connection was not taken: Too many open files" in caplog.text)
        assert _is_hung_up_on(made[0])
        ending = threading.Thread(target=router.close, daemon=True)
        ending.start()
        ending.join(WAIT)
        assert not ending.is_alive()
    finally:
        for connection in made:
            connection.close()


def test_a_parcel_server_reads_questions_and_nothing_else(raw: Callable) -> None:
    server = ParcelServer("127.0.0.1", OPEN, None)
    try:
        assert pour(spoken_to(raw(server)), b"\x01\xff" + bytes(255), 1000 * MESSAGE) < 1000 * MESSAGE
        client = ParcelClient(server.address, server.public_key, OPEN, None)
        client.close()
    finally:
        server.close()


def test_a_flood_at_the_end_does_not_hold_up_the_end(keys: Path, raw: Callable) -> None:
    """libzmq waits for room in its queue of events, and an end of its monitor for libzmq."""
    router = Router("tcp://127.0.0.1:0", STREAM, keys)
    stop = threading.Event()
    address = router.address.removeprefix("tcp://").split(":")

    def flood() -> None:
        while not stop.is_set():
            try:
                socket.create_connection((address[0], int(address[1])), timeout=WAIT).close()
            except OSError:
                return

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    ending = threading.Thread(target=router.close)
    ending.start()
    ending.join(WAIT)
    stop.set()
    for thread in threads:
        thread.join(WAIT)
    assert not ending.is_alive()


def _is_hung_up_on(connection: socket.socket) -> bool:
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_a_connection_whose_place_was_taken_does_not_abort_the_process_when_it_ends(tmp_path: Path) -> None:
    """libzmq's engine of a former connection of an identity reads no more, and a PING of it would end everything."""
    code = """
import sys, time, zmq
from streamrl.config.replay import StreamConfig
from streamrl.stream import sockets
from streamrl.stream.sockets import Router
sockets.PING = 300  # milliseconds, where there are such questions
router = Router("tcp://127.0.0.1:0", StreamConfig(curve="off"))
def dealer():
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IDENTITY, b"twin")
    socket.connect(router.address)
    socket.send(bytes(8) + b"word")
    while (received := router.receive(0.1)) is None: pass
    return socket
first = dealer()
second = dealer()
for _ in range(100): first.send(bytes(9))
time.sleep(0.2)
first.close()
end = time.monotonic() + 1.5
while time.monotonic() < end: router.receive(0.1)
second.send(bytes(8) + b"word")
assert router.receive(5.0) is not None
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "alive\n", done.stderr

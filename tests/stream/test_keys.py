"""The run's keys: made once, kept from others, and asked of every peer that is not on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
import zmq

from streamrl.config import Config
from streamrl.config.replay import StreamConfig
from streamrl.stream.codec import decode_group
from streamrl.stream.keys import (
    KeysUnusable,
    bearer_token,
    client_keys,
    key_folder,
    needs_curve,
    service_keys,
)
from streamrl.stream.messages import Accepted, Credit, decode
from streamrl.stream.sockets import Dealer, Router
from streamrl.types import Group
from tests.operations_table import documented

Connect = Callable[..., Dealer]
LOCAL = "tcp://127.0.0.1:0"
STREAM = StreamConfig(curve="on", reply_timeout=10.0)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "run" / "keys"


@pytest.fixture
def router(keys: Path) -> Iterator[Router]:
    router = Router(LOCAL, STREAM, keys)
    yield router
    router.close()


@pytest.mark.parametrize(
    ("address", "needed"),
    [
        ("tcp://127.0.0.1:0", True),
        ("tcp://127.9.9.9:7000", True),
        ("tcp://[::1]:7000", True),
        ("tcp://localhost:7000", True),
        ("tcp://lo:7000", True),
        ("ipc:///tmp/replay", False),
        ("ipc://@replay", True),
        ("inproc://replay", False),
        ("tcp://0.0.0.0:7000", True),
        ("tcp://*:7000", True),
        ("tcp://[::]:7000", True),
        ("tcp://10.0.0.7:7000", True),
        ("tcp://[fe80::1%eth0]:7000", True),
        ("tcp://localhost.example.org:7000", True),
        ("tcp://eth0:7000", True),
    ],
)
def test_every_address_that_another_user_can_reach_is_authenticated_by_default(address: str, needed: bool) -> None:
    assert needs_curve(StreamConfig(), address) is needed
    assert needs_curve(StreamConfig(curve="on"), address)
    assert not needs_curve(StreamConfig(curve="off"), address)


def test_keys_are_in_the_run_folder_unless_configured(tmp_path: Path) -> None:
    assert key_folder(Config(), tmp_path) == tmp_path / "keys"
    elsewhere = Config.model_validate({"stream": {"keys": tmp_path / "mine"}})
    assert key_folder(elsewhere, tmp_path / "run") == tmp_path / "mine"


def test_secrets_are_made_once_and_kept_from_others(keys: Path) -> None:
    made = service_keys(keys)
    token = bearer_token(keys, "api")
    assert keys.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in keys.iterdir()}
    assert modes == {
        "service.key": 0o600,
        "client.key": 0o600,
        "api.key": 0o600,
        "service.pub": 0o644,
        "client.pub": 0o644,
    }
    assert service_keys(keys) == made
    assert bearer_token(keys, "api") == token
    assert token != bearer_token(keys, "admin")
    client = client_keys(keys)
    assert client.public == made.client_public
    assert zmq.curve_public(made.secret) == client.service_public


@pytest.mark.parametrize(("curve", "made"), [("auto", True), ("off", False)])
def test_a_service_that_needs_no_keys_makes_them_for_others_unless_curve_is_off(
    keys: Path, tmp_path: Path, curve: Literal["auto", "off"], made: bool
) -> None:
    Router(f"ipc://{tmp_path}/replay", StreamConfig(curve=curve), keys).close()
    assert keys.exists() is made


def test_processes_that_make_keys_at_once_agree_on_them(keys: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert len(set(pool.map(lambda _: (service_keys(keys), bearer_token(keys, "api")), range(64)))) == 1


def test_keys_that_are_there_need_no_folder_that_can_be_written(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = service_keys(keys)

    def refuse(**_: object) -> tuple[int, str]:  # root may write everywhere, so that a mode would say nothing
        raise OSError("read-only file system")

    monkeypatch.setattr("streamrl.stream.keys.tempfile.mkstemp", refuse)
    assert service_keys(keys) == made


@pytest.fixture
def owned_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Files belong to another user: to give one away takes root."""
    real = Path.stat

    def own(owner: int) -> None:
        def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
            fields = list(real(path, follow_symlinks=follow_symlinks))
            fields[4] = owner
            return os.stat_result(fields)

        monkeypatch.setattr(Path, "stat", stat)

    return own


@pytest.mark.parametrize(("owner", "mode"), [(1000, 0o640), (1000, 0o604), (0, 0o604), (0, 0o660)])
def test_a_secret_that_others_can_read_is_refused(keys: Path, owned_by: Callable, owner: int, mode: int) -> None:
    service_keys(keys)
    (keys / "client.key").chmod(mode)
    owned_by(owner)
    with pytest.raises(KeysUnusable) as unusable:
        client_keys(keys)
    documented("...client.key can be read by others (mode ...): chmod 600...", str(unusable.value), 1)


def test_a_secret_of_root_s_may_be_read_by_its_group_as_in_a_pod(keys: Path, owned_by: Callable) -> None:
    made = service_keys(keys)
    (keys / "client.key").chmod(0o440)
    owned_by(0)
    assert client_keys(keys).public == made.client_public


def test_a_secret_of_another_user_is_one_line(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service_keys(keys)

    def refuse(path: Path) -> bytes:  # root may read everything
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(KeysUnusable) as unusable:
        client_keys(keys)
    documented(
        "...client.key is closed to user ...: it or its folder belongs to another one; allowed: ...",
        str(unusable.value),
        1,
    )


def test_a_folder_that_cannot_be_searched_is_one_line(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:  # root may search everything
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    for use in (service_keys, lambda folder: bearer_token(folder, "api")):
        with pytest.raises(KeysUnusable, match=r"\.key is closed to user \d+: it or its folder belongs to another one"):
            use(keys)


def test_a_folder_that_cannot_be_made_is_one_line(keys: Path) -> None:
    keys.parent.mkdir(parents=True, exist_ok=True)
    keys.write_text("a file")
    for use in (service_keys, client_keys, lambda folder: bearer_token(folder, "api")):
        with pytest.raises(KeysUnusable, match=r"\.key: (File exists|Not a directory); allowed: a folder that"):
            use(keys)


def test_keys_that_cannot_be_used_say_why(keys: Path) -> None:
    with pytest.raises(KeysUnusable) as unusable:
        Dealer("tcp://127.0.0.1:9", STREAM, keys)
    documented("...client.key is missing: the replay service makes it...", str(unusable.value), 1)
    with pytest.raises(KeysUnusable, match="folder of the run's keys"):
        Dealer("tcp://127.0.0.1:9", STREAM)
    keys.mkdir(parents=True)
    (keys / "service.key").touch(0o600)
    with pytest.raises(KeysUnusable, match=r"service\.key is empty"):
        service_keys(keys)
    (keys / "service.key").write_text("not a key\n")
    with pytest.raises(KeysUnusable, match=r"service\.key holds no CURVE key"):
        service_keys(keys)


def test_a_peer_with_the_run_s_key_is_served_encrypted(
    router: Router, keys: Path, make_group: Callable[..., Group], connect: Connect
) -> None:
    dealer = connect(router.address, STREAM, keys, "learner")
    dealer.send(make_group(5, tokens=100_000))
    received = router.receive(10.0)
    assert received is not None
    assert decode_group(*received.frames).group_id == 5
    assert router.send(received.peer, Accepted(group_id=5, attempt=0))
    assert dealer.receive(10.0) == Accepted(group_id=5, attempt=0)
    assert router.refused == 0


def _stranger(address: str, curve: tuple[bytes, bytes, bytes] | None) -> zmq.Socket:
    """A DEALER without the run's keys that has said something."""
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    if curve is not None:
        stranger.curve_publickey, stranger.curve_secretkey, stranger.curve_serverkey = curve
    stranger.connect(address)
    stranger.send(b"let me in")
    return stranger


@pytest.mark.parametrize("kind", ["no curve", "another client key", "another service key"])
def test_a_peer_without_the_run_s_key_gets_nothing_and_is_counted(
    router: Router, keys: Path, kind: str, connect: Connect
) -> None:
    run = client_keys(keys)
    curves = {
        "no curve": None,
        "another client key": (*zmq.curve_keypair(), run.service_public),
        "another service key": (run.public, run.secret, zmq.curve_keypair()[0]),
    }
    foreign = _stranger(router.address, curves[kind])
    deadline = time.monotonic() + 10.0
    while not router.refused and time.monotonic() < deadline:
        assert router.receive(0.05) is None
    assert router.refused > 0
    dealer = connect(router.address, STREAM, keys)
    dealer.send(Credit(capacity=1))  # and those who have it are served
    received = router.receive(10.0)
    assert received is not None
    assert decode(received.frames[0]) == Credit(capacity=1)
    foreign.close()


def test_a_peer_that_does_not_speak_zeromq_is_hung_up_on(router: Router) -> None:
    host, port = router.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as foreign:
        foreign.sendall(b"GET / HTTP/1.1\r\nHost: streamrl\r\n\r\n" + bytes(64))
        with contextlib.suppress(ConnectionResetError):
            while foreign.recv(1024):
                pass
    assert router.receive(0.05) is None


def test_no_thread_is_left_behind_a_closed_service(keys: Path) -> None:
    before = threading.active_count()
    router = Router(LOCAL, STREAM, keys)
    assert threading.active_count() == before + 1
    router.close()
    deadline = time.monotonic() + 10.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_asyncio_peers_bring_the_key_too(router: Router, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.stream.sockets.LINGER", 20_000)  # milliseconds; its last word has the time it takes

    async def peer() -> None:
        dealer = Dealer(router.address, STREAM, keys, "generator-0", on_loop=True)
        await dealer.send_async(Credit(capacity=2))
        dealer.close()

    asyncio.run(peer())
    received = router.receive(10.0)
    assert received is not None
    assert received.peer.startswith(b"generator-0:")

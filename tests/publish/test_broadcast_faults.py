"""Servers that are lost while weights travel, at every moment, over gloo and with NCCL's manners."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from streamrl.config import Config
from streamrl.observe.events import EventLog, event_path
from streamrl.publish.broadcast_source import BroadcastSource
from streamrl.publish.publisher import Publisher
from streamrl.publish.rank_zero_process import SeparateRankZero
from streamrl.publish.staging import Staged, Staging
from streamrl.publish.transport import Check, PublishError
from streamrl.stream.messages import Applied, Hello, Message, Publish, PublishFailed, Roster, ServerState
from streamrl.types import PolicyVersion
from tests.publish.conftest import TIMEOUT, Backend
from tests.publish.receiver import NEVER, REPOSITORY, Receiver
from tests.publish.test_broadcast import until
from tests.scripted_service import ScriptedService, Word

V0, V1, V2 = (PolicyVersion(step) for step in range(3))
LOST, OTHER = ServerState(name="lost", version=V0), ServerState(name="other", version=V0)


def checksums(staged: Staged) -> str:
    return " ".join(layout.checksum for layout in staged.layouts(checksums=True))


def once(happened: Callable[[], bool]) -> Check:
    """A check that gives up when something has happened, and fails when it does not happen."""
    end = time.monotonic() + TIMEOUT

    def check() -> None:
        assert time.monotonic() < end
        if happened():
            raise PublishError("gave up")
        time.sleep(0.002)

    return check


def when_silent(receiver: Receiver, then: Callable[[], None] = lambda: None) -> threading.Thread:
    """`then` behind the receiver's silence, in a thread that ends with it."""

    def wait() -> None:
        assert receiver.said() == "silent"
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def serves(source: BroadcastSource, server: ServerState, receiver: Receiver, staged: Staged) -> bool:
    receiver.receive(source.manifest(server, staged))
    source.send(server, staged, until(TIMEOUT))
    return receiver.said() == checksums(staged)


@pytest.fixture
def source(backend: Backend) -> Iterator[BroadcastSource]:
    made = backend.source()
    yield made
    made.close()


def test_versions_arrive_bit_by_bit_in_one_group_as_long_as_the_server_stays(
    backend: Backend, source: BroadcastSource, other: Receiver, model_folders: tuple[Path, Path]
):
    assert serves(source, OTHER, other, backend.staged(model_folders[0], 1))
    first = source.manifest(OTHER, backend.staged(model_folders[1], 2))
    assert serves(source, OTHER, other, backend.staged(model_folders[1], 2))
    assert source.manifest(OTHER, backend.staged(model_folders[0], 3))["group"] == first["group"]


def test_a_server_that_never_comes_costs_the_source_no_longer_than_it_waits(
    backend: Backend, source: BroadcastSource, model_folders: tuple[Path, Path]
):
    staged = backend.staged(model_folders[0], 1)
    source.manifest(LOST, staged)
    with pytest.raises(PublishError, match="gave up"):
        source.send(LOST, staged, until(0.2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "bucket",
    [pytest.param(0, marks=pytest.mark.slow, id="before the first bucket"), pytest.param(1, id="between two buckets")],
)
@pytest.mark.parametrize(
    "killed", [pytest.param(False, marks=pytest.mark.slow, id="silent"), pytest.param(True, id="killed")]
)
def test_a_server_that_is_lost_in_a_broadcast_holds_nobody_and_the_others_are_served(
    *,
    backend: Backend,
    source: BroadcastSource,
    lost: Receiver,
    other: Receiver,
    model_folders: tuple[Path, Path],
    bucket: int,
    killed: bool,
):
    """Before the first bucket, NCCL's communicator is waited for."""
    staged = backend.staged(model_folders[0], 1)
    assert len(staged.buckets) > 1
    assert serves(source, OTHER, other, staged)
    lost.receive(source.manifest(LOST, staged), silent_before=bucket)
    silence = when_silent(lost, lost.kill if killed else lambda: None)
    end = time.monotonic() + 2.0

    def given_up() -> bool:
        return not silence.is_alive() and time.monotonic() > end

    with pytest.raises(PublishError, match="gave up" if backend.lazy or not killed else LOST.name):
        source.send(LOST, staged, once(given_up))
    source.drop(LOST.name)
    for step in (2, 3):
        assert serves(source, OTHER, other, backend.staged(model_folders[step % 2], step))


def test_over_gloo_a_server_that_falls_silent_may_still_receive_what_it_was_sent(
    gloo: Backend, lost: Receiver, model_folders: tuple[Path, Path]
):
    source, staging, staged = gloo.source(), Staging(1 << 30), gloo.staged(model_folders[0], 1)
    staged = staging.fill(V1, staged.tensors())
    lost.receive(source.manifest(LOST, staged), silent_before=0)
    silence = when_silent(lost)
    with pytest.raises(PublishError, match="gave up"):
        source.send(LOST, staged, once(lambda: not silence.is_alive()))
    source.drop(LOST.name)
    (left,) = [thread for thread in threading.enumerate() if thread.name == "left"]
    assert left.is_alive()  # waits for the end of the broadcast, so that nobody else has to
    assert source.reads_on()
    staging.leave()
    staging.fill(V2, gloo.staged(model_folders[1], 2).tensors())
    lost.go()
    assert lost.said() == checksums(staged)
    left.join(TIMEOUT)
    assert not left.is_alive()
    assert not source.reads_on()


def test_nothing_is_read_of_a_version_once_the_process_that_read_it_was_killed(
    lazy: Backend, lost: Receiver, other: Receiver, model_folders: tuple[Path, Path]
):
    """Its memory is not written over while the kernel has not ended it, either: a killed reader holds its lock."""
    source, staged = lazy.source(), lazy.staged(model_folders[0], 1)
    assert serves(source, OTHER, other, staged)
    lost.receive(source.manifest(LOST, staged), silent_before=1)
    silence = when_silent(lost)
    with pytest.raises(PublishError, match="gave up"):
        source.send(LOST, staged, once(lambda: not silence.is_alive()))
    assert not source.reads_on()
    source.close()
    again = lazy.staging[-1].fill(V2, lazy.staged(model_folders[1], 2).tensors())
    assert again.place is not None
    assert staged.place is not None
    assert again.place.token == staged.place.token, "somebody holds the lock of the memory"


@pytest.mark.slow
def test_a_process_that_has_ended_costs_one_publish_and_no_server(
    lazy: Backend, other: Receiver, model_folders: tuple[Path, Path]
):
    """And none, where it has ended between two versions."""
    source = lazy.source()
    rank_zero = source._rank_zero
    assert isinstance(rank_zero, SeparateRankZero)
    assert serves(source, OTHER, other, lazy.staged(model_folders[0], 1))
    source.manifest(OTHER, staged := lazy.staged(model_folders[1], 2))
    assert rank_zero.pid is not None
    os.kill(rank_zero.pid, signal.SIGKILL)
    with pytest.raises(PublishError, match="other: "):
        source.send(OTHER, staged, until(TIMEOUT))
    source.drop(OTHER.name)
    assert serves(source, OTHER, other, staged)
    os.kill(rank_zero.pid, signal.SIGKILL)
    while rank_zero.pid is not None:
        time.sleep(0.01)
    assert serves(source, OTHER, other, lazy.staged(model_folders[0], 3))
    source.close()


def test_who_is_given_up_while_the_process_starts_does_not_start_it_again(
    lazy: Backend, other: Receiver, model_folders: tuple[Path, Path]
):
    """A `publish.timeout` shorter than the start would else never see the end of one."""
    source, staged = lazy.source(), lazy.staged(model_folders[0], 1)
    rank_zero = source._rank_zero
    assert isinstance(rank_zero, SeparateRankZero)
    other.receive(source.manifest(LOST, staged))
    assert rank_zero.pid is not None
    process = psutil.Process(rank_zero.pid)
    process.suspend()  # it has not started
    with pytest.raises(PublishError, match="gave up"):
        source.send(LOST, staged, once(lambda: source._groups[LOST.name].met))
    source.drop(LOST.name)
    assert other.said().startswith("failed")
    process.resume()
    assert serves(source, OTHER, other, staged)
    assert rank_zero.pid == process.pid
    source.close()


def test_the_process_ends_with_its_learner(lazy: Backend):
    code = (
        "import time; from streamrl.device import Device; from streamrl.publish.rank_zero_process import *\n"
        "rank_zero = SeparateRankZero(Device('cpu', 0), 60.0); rank_zero.prepare()\n"
        "rank_zero._await_idle(lambda: time.sleep(0.01)); print(rank_zero.pid, flush=True); time.sleep(600)"
    )
    learner = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert learner.stdout is not None
    process = psutil.Process(int(learner.stdout.readline()))
    process.suspend()  # as if it hung: it cannot see for itself that nobody is left
    learner.kill()
    learner.wait(TIMEOUT)
    process.wait(TIMEOUT)


class Fleet:
    """The script of a service whose servers are receivers: one is killed in the middle of its first version."""

    def __init__(self, receivers: dict[str, Receiver], lost: str) -> None:
        self.receivers = receivers
        self.lost = lost
        self.received: dict[str, list[str]] = {name: [] for name in receivers}

    def __call__(self, word: Word) -> Iterator[Message]:
        if isinstance(word, Hello):
            yield Roster(servers=tuple(ServerState(name=name, version=V0) for name in self.receivers))
        elif isinstance(word, Publish):
            receiver, told = self.receivers[word.server], {"server": word.server, "version": word.version}
            if receiver.process.poll() is not None:
                return
            receiver.receive(word.manifest, silent_before=1 if word.server == self.lost else NEVER)
            said = receiver.said()
            if said == "silent":
                receiver.kill()
            elif said.startswith("failed"):
                yield PublishFailed(reason=said, attempt=word.attempt, **told)
            else:
                self.received[word.server].append(said)
                yield Applied(**told)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["lazy", "gloo"], indirect=True)
def test_a_server_that_is_killed_in_a_broadcast_ends_no_learner_and_the_others_get_every_version(
    backend: Backend, lost: Receiver, other: Receiver, model_folders: tuple[Path, Path], tmp_path: Path
):
    """This process is the learner. Its publisher waits for the lost server no longer than `publish.timeout`."""
    fleet = Fleet({"lost": lost, "other": other}, "lost")
    tree = {
        "model": {"path": model_folders[0]},
        "publish": {"bucket": 1 << 16, "timeout": 8.0},
        "stream": {"curve": "off"},
    }
    service, events = ScriptedService(tmp_path, script=fleet), EventLog(event_path(tmp_path, "learner"), "learner-0")
    publisher = Publisher(Config.model_validate(tree), tmp_path, V0, events)
    versions = [backend.staged(folder, step) for step, folder in enumerate(model_folders, 1)]
    try:
        for count, staged in enumerate(versions, 1):
            publisher.offer(staged.version, staged.tensors())
            end = time.monotonic() + 2 * TIMEOUT
            while publisher.statistics.published < count:
                assert time.monotonic() < end
                time.sleep(0.05)
        assert publisher.statistics.failed >= 1
        assert lost.process.poll() is not None
    finally:
        publisher.close()
        service.close()
        events.close()
    assert fleet.received["other"] == [checksums(staged) for staged in versions]

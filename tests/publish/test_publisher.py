"""The publisher against a service that the test plays, with one real server and one that never answers."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from streamrl.config import Config
from streamrl.device_copy import Copied, CpuCopy
from streamrl.engine.client import EngineClient
from streamrl.generate.gate import RequestGate
from streamrl.generate.weight_sinks import make_sink
from streamrl.observe.disk import lacks_room
from streamrl.observe.events import EventLog, event_path, read_events
from streamrl.publish import kept_versions, publisher
from streamrl.publish.publisher import Publisher
from streamrl.publish.staging import Staged
from streamrl.publish.transport import Check, PublishError, Source
from streamrl.recorded.weights import kept_versions as kept_in
from streamrl.stream.messages import (
    Announce,
    Applied,
    Bye,
    Hello,
    Introduce,
    Message,
    Publish,
    PublishFailed,
    Roster,
    ServerState,
)
from streamrl.types import PolicyVersion
from tests.limited_files import limited_files
from tests.scripted_service import ScriptedService, Word

DEADLINE = 120.0  # seconds; longer than any wait that is configured here


def config_of(model: Path, transport: str = "broadcast", **publish: object) -> Config:
    settings = {"transport": transport, "bucket": 1 << 16, **publish}
    return Config.model_validate({"model": {"path": model}, "publish": settings, "stream": {"curve": "off"}})


class Worker:
    """The script of a service that has one worker."""

    def __init__(
        self,
        address: str | None,
        dead: tuple[str, ...] = (),
        failing: int = 0,
        transport: str = "broadcast",
    ) -> None:
        """`address` of the real server, if any; `dead` servers never answer; the first `failing` publishes fail."""
        self.config = config_of(Path("."), transport, timeout=DEADLINE)
        self.failing = failing
        self.forgets = False  # set: the service does not know the publisher once
        self.versions = {name: PolicyVersion(0) for name in (*dead, *(("real",) if address else ()))}
        self.address = address
        self._runner = asyncio.Runner()
        self._client: EngineClient | None = None

    def __call__(self, word: Word) -> Iterator[Message]:
        if self.forgets:
            self.forgets = False
            yield Introduce()
        if isinstance(word, Hello):
            yield self._roster()
        elif isinstance(word, Publish) and word.server == "real":
            yield self._runner.run(self._apply(word))
            yield self._roster()

    def close(self) -> None:
        if self._client is not None:
            self._runner.run(self._client.close())
        self._runner.close()

    async def _apply(self, message: Publish) -> Message:
        if self.failing:
            self.failing -= 1
            return _failed(message, "not today")
        if self._client is None:
            self._client = EngineClient(self.address or "", DEADLINE)
            self._sink = make_sink(self.config, self._client, RequestGate())
        try:
            await self._sink.apply(message.version, message.manifest)
        except PublishError as error:
            return _failed(message, str(error))
        self.versions["real"] = message.version
        return Applied(server="real", version=message.version)

    def _roster(self) -> Roster:
        return Roster(servers=tuple(ServerState(name=name, version=at) for name, at in sorted(self.versions.items())))


def _failed(message: Publish, reason: str) -> PublishFailed:
    return PublishFailed(server=message.server, version=message.version, reason=reason, attempt=message.attempt)


class Bench:
    """A publisher and what it needs."""

    def __init__(self, worker: Worker, model: Path, folder: Path, timeout: float, at_once: int) -> None:
        transport = worker.config.publish.transport
        self.config = config_of(model, transport, timeout=timeout, keep_every=2, at_once=at_once)
        self.worker = worker
        self.service = ScriptedService(folder, script=worker)
        self.folder = folder
        self.events = EventLog(event_path(folder, "learner"), "learner-0")
        self.publisher = Publisher(self.config, folder, PolicyVersion(0), self.events)

    def end(self) -> None:
        self.publisher.close()
        self.service.close()
        self.worker.close()
        self.events.close()

    def published(self) -> list[Publish]:
        return [message for message in self.service.received if isinstance(message, Publish)]


@pytest.fixture
def bench(model_folders, tmp_path) -> Iterator:
    benches: list[Bench] = []

    def make(worker: Worker, timeout: float = 60.0, at_once: int = 1) -> Bench:
        benches.append(Bench(worker, model_folders[0], tmp_path, timeout, at_once))
        return benches[-1]

    yield make
    for one in benches:
        one.end()


@pytest.mark.parametrize("transport", ["broadcast", "broadcast over lazy", "disk", "memory", "delta"], indirect=True)
def test_a_dead_server_holds_neither_the_others_nor_the_training_loop(transport, fresh_server, model_folders, bench):
    weights = load_file(model_folders[1] / "model.safetensors")
    running = bench(Worker(fresh_server.address, dead=("dead",), transport=transport), timeout=2.0)
    began = time.monotonic()
    running.publisher.offer(PolicyVersion(1), weights.items())
    assert time.monotonic() - began < 2.0  # the copy alone, not the dead server's deadline
    deadline = time.monotonic() + DEADLINE
    while running.worker.versions["real"] < PolicyVersion(1):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not running.publisher.wait(0.1)  # the dead one is still on the roster
    statistics = running.publisher.statistics
    assert statistics.failed >= 1


def test_servers_that_hang_hold_a_version_for_two_timeouts_however_many_they_are(model_folders, bench):
    weights = load_file(model_folders[1] / "model.safetensors")
    names = tuple(f"dead {number}" for number in range(6))
    running = bench(Worker(None, dead=names, transport="memory"), timeout=0.5)
    deadline, last = time.monotonic() + DEADLINE, 0
    while {message.server for message in running.published()} != set(names):  # in turn: none is left out
        assert time.monotonic() < deadline
        last += 1
        running.publisher.offer(PolicyVersion(last), weights.items())
        if not running.published():
            time.sleep(0.05)  # the list of the servers has not come yet
    of_each = [sum(message.version.step == step for message in running.published()) for step in range(1, last)]
    assert max(of_each) < len(names), of_each  # two, unless this machine is slow to offer the next one


def test_servers_at_once_do_not_wait_for_each_other(fresh_server, model_folders, bench):
    weights = load_file(model_folders[1] / "model.safetensors")
    worker = Worker(fresh_server.address, dead=("a dead one", "another"), transport="memory")  # before `real`
    running = bench(worker, timeout=DEADLINE, at_once=3)
    running.publisher.offer(PolicyVersion(1), weights.items())
    deadline = time.monotonic() + DEADLINE / 2  # the dead ones are still waited for
    while worker.versions["real"] < PolicyVersion(1):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert running.publisher.statistics.failed == 0
    assert {message.server for message in running.published()} == {"a dead one", "another", "real"}


def test_versions_are_sent_to_servers_that_are_behind_and_kept_as_folders(backend, fresh_server, model_folders, bench):
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    running = bench(Worker(fresh_server.address))
    for step in range(4):
        running.publisher.offer(PolicyVersion(step), weights[step % 2].items())
    assert running.publisher.wait(DEADLINE)
    sent = [message.version.step for message in running.published()]
    assert 0 not in sent  # the server began with it
    assert sent == sorted(sent)
    assert sent[-1] == 3
    assert {message.manifest["group"] for message in running.published()} == {running.published()[0].manifest["group"]}
    assert sorted(version.step for version in kept_in(running.folder)) == [0, 2]
    for version, folder in kept_in(running.folder).items():
        stored = load_file(folder / "model.safetensors")
        assert all(torch.equal(stored[name], tensor) for name, tensor in weights[version.step % 2].items())
        assert (folder / "config.json").exists()
        assert (folder / "tokenizer.json").exists()


def test_a_failed_publish_is_tried_again(backend, fresh_server, model_folders, bench):
    weights = load_file(model_folders[1] / "model.safetensors")
    running = bench(Worker(fresh_server.address, failing=1))
    running.publisher.offer(PolicyVersion(1), weights.items())
    assert running.publisher.wait(DEADLINE)
    first, second = running.published()
    assert first.manifest["group"] != second.manifest["group"]
    ends = [event for event in read_events(running.events.path) if event.get("phase") == "end"]
    assert [("error" in event) for event in ends if event["event"] == "publish"] == [True, False]
    assert any("not today" in event.get("error", "") for event in ends)


class Prompt(Worker):
    """The script of a service whose servers have every version as soon as they are told of it."""

    def __init__(self, *servers: str, transport: str = "broadcast") -> None:
        super().__init__(None, dead=servers, transport=transport)

    def __call__(self, word: Word) -> Iterator[Message]:
        yield from super().__call__(word)
        if isinstance(word, Publish):
            self.versions[word.server] = word.version
            yield Applied(server=word.server, version=word.version)


class Clock:
    """The `time` module, by whose clock more time passes where a test says so."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_a_machine_without_a_free_port_costs_an_attempt_and_not_the_training(bench, monkeypatch):
    """The server's sink takes no bytes: the transport waits for it no longer than it must."""
    refusals, create = [OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))], socket.create_server

    def refuse_once(*where: Any, **how: Any) -> socket.socket:
        if refusals:
            raise refusals.pop()
        return create(*where, **how)

    monkeypatch.setattr(socket, "create_server", refuse_once)
    running = bench(Prompt("prompt"))
    running.publisher.offer(PolicyVersion(1), [("w", torch.zeros(4))])
    assert running.publisher.wait(DEADLINE)
    assert running.publisher.ready(DEADLINE)
    running.publisher.offer(PolicyVersion(3), [("w", torch.zeros(4))])
    assert running.publisher.wait(DEADLINE)
    assert running.publisher.statistics.failed == 1
    assert [message.version.step for message in running.published()] == [1, 3]


def test_a_version_that_is_to_be_kept_waits_for_room_on_the_disk(bench, monkeypatch):
    monkeypatch.setattr(publisher, "KEEP_POLL", 0.01)
    full, keep = threading.Event(), kept_versions.keep
    full.set()

    def keep_in_room(*what: Any) -> Path:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return keep(*what)

    monkeypatch.setattr(kept_versions, "keep", keep_in_room)
    running = bench(Worker(None))
    running.publisher.offer(PolicyVersion(2), [("w", torch.zeros(4))])
    _until(lambda: running.publisher.lacks_room)
    assert not running.publisher.ready(0.1)
    assert not any(isinstance(message, Announce) for message in running.service.received)
    full.clear()
    assert running.publisher.ready(DEADLINE)
    assert not running.publisher.lacks_room
    assert [version.step for version in kept_in(running.folder)] == [2]


def test_what_a_learner_that_was_killed_while_it_kept_a_version_has_left_is_removed(bench, tmp_path):
    weights = kept_versions.kept_root(tmp_path)
    (weights / ".12.0.999999").mkdir(parents=True)
    (weights / ".8.0.old").mkdir()  # its successor has not got its name
    (weights / "4.0").mkdir()
    kept_versions.KeptVersions(Config(), tmp_path, EventLog(event_path(tmp_path, "learner"), "learner-0"))
    assert sorted(path.name for path in weights.iterdir()) == ["4.0", "8.0"]


def test_a_full_disk_is_known_also_by_what_safetensors_says_of_it(tmp_path):
    with limited_files(1 << 10), pytest.raises(SafetensorError) as failed:
        save_file({"w": torch.zeros(1 << 14)}, tmp_path / "weights.safetensors")
    assert lacks_room(failed.value)
    assert not lacks_room(SafetensorError("Error while deserializing header: header too large"))


class ReadsOn(Source):
    """A source whose bytes go out when it has long been told to stop."""

    def __init__(self) -> None:
        self.reading: list[Staged] = []

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        return {}

    def send(self, server: ServerState, staged: Staged, check: Check) -> None:
        self.reading.append(staged)
        raise PublishError("fell silent")

    def drop(self, server: str) -> None:
        pass

    def reads_on(self) -> bool:
        return True

    def close(self) -> None:
        pass


def test_a_version_is_not_staged_over_one_that_is_still_read(model_folders, bench, monkeypatch):
    source = ReadsOn()
    monkeypatch.setattr(publisher, "make_source", lambda *_: source)
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    running = bench(Worker(None, dead=("dead",)))
    deadline = time.monotonic() + DEADLINE
    for step in (1, 2):
        running.publisher.offer(PolicyVersion(step), weights[step - 1].items())
        while step not in [staged.version.step for staged in source.reading]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    for staged in source.reading:
        expected = weights[staged.version.step - 1]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in staged.tensors())


class ReadsNoMore(ReadsOn):
    """One that is done with the bytes when it has failed."""

    def reads_on(self) -> bool:
        return False


class Prepares(ReadsNoMore):
    """One that prepares a version for longer than `publish.timeout`."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self._clock, self._seconds = clock, seconds

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        self._clock.ahead += self._seconds
        return {}

    def send(self, server: ServerState, staged: Staged, check: Check) -> None:
        check()


def test_the_time_that_the_source_takes_is_none_of_the_servers(bench, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(publisher, "time", clock)
    monkeypatch.setattr(publisher, "make_source", lambda *_: Prepares(clock, 2 * DEADLINE))
    running = bench(Prompt("prompt"), timeout=DEADLINE)
    running.publisher.offer(PolicyVersion(1), [("w", torch.zeros(4))])
    assert running.publisher.wait(DEADLINE)
    assert running.publisher.statistics.failed == 0
    assert [message.version.step for message in running.published()] == [1]


def test_nothing_goes_out_between_the_word_that_an_offer_need_not_wait_and_the_offer(bench, monkeypatch):
    """The other ranks are in the export by then."""
    clock, source = Clock(), ReadsNoMore()
    monkeypatch.setattr(publisher, "time", clock)
    monkeypatch.setattr(publisher, "make_source", lambda *_: source)
    running = bench(Worker(None, dead=("dead",)))
    running.publisher.offer(PolicyVersion(1), [("w", torch.zeros(4))])
    _until(lambda: source.reading)
    assert running.publisher.ready(DEADLINE)
    before, rounds = len(source.reading), running.publisher._staging_lock
    clock.ahead += 60.0  # the next try is due
    counted = Counted(rounds)
    monkeypatch.setattr(running.publisher, "_staging_lock", counted)
    _until(lambda: counted.taken >= 2)
    assert len(source.reading) == before
    running.publisher.offer(PolicyVersion(3), [("w", torch.ones(4))])
    _until(lambda: len(source.reading) > before)


class Counted:
    """A lock that counts how often it was taken."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock, self.taken = lock, 0

    def acquire(self, timeout: float = -1) -> bool:
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()
        self.taken += 1

    def __exit__(self, *raised: object) -> None:
        self.release()


def test_after_an_export_that_breaks_off_no_server_gets_the_bytes_that_it_has_overwritten(bench, monkeypatch):
    source = ReadsNoMore()
    monkeypatch.setattr(publisher, "make_source", lambda *_: source)
    running = bench(Worker(None, dead=("dead",)))
    running.publisher.offer(PolicyVersion(1), [("w", torch.zeros(1 << 16))])
    _until(lambda: source.reading)
    sent: list[int] = []

    def breaks_off() -> Iterator[tuple[str, torch.Tensor]]:
        sent.append(len(source.reading))
        yield "w", torch.ones(1 << 16)  # a bucket of its own, which is copied before the next one is asked for
        time.sleep(1.5)  # longer than the pause before the next try, which waits for the bytes
        yield "x", torch.ones(4)
        raise ConnectionError("a rank is gone")

    with pytest.raises(ConnectionError, match="a rank is gone"):
        running.publisher.offer(PolicyVersion(2), breaks_off())
    _until(lambda: any(isinstance(message, Bye) for message in running.service.received))
    assert len(source.reading) == sent[0]


class ReleasedSlowly:
    """A lock behind whose release the publisher's thread always comes first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, timeout: float = -1) -> bool:
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()
        if threading.current_thread() is threading.main_thread():
            time.sleep(2.5)  # longer than the pause before the next try

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *raised: object) -> None:
        self.release()


class ReadsVersions(ReadsNoMore):
    """It keeps which version it is given, and the first of its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[int, float]] = []

    def send(self, server: ServerState, staged: Staged, check: Check) -> None:
        self.given.append((staged.version.step, next(iter(staged.tensors()))[1].flatten()[0].item()))
        raise PublishError("not today")


def test_no_server_gets_a_version_with_the_bytes_of_the_next(bench, monkeypatch):
    source = ReadsVersions()
    monkeypatch.setattr(publisher, "make_source", lambda *_: source)
    running = bench(Worker(None, dead=("dead",)))
    monkeypatch.setattr(running.publisher, "_staging_lock", ReleasedSlowly())
    for step in (1, 2):
        running.publisher.offer(PolicyVersion(step), [("w", torch.full((4,), float(step)))])
    _until(lambda: any(step == 2 for step, _ in source.given))
    assert {step for step, _ in source.given} == {1, 2}
    assert all(step == value for step, value in source.given), source.given


class Pending(Copied):
    """A copy out of a GPU that ends when the test says so."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def is_done(self) -> bool:
        return self.ended.is_set()


def test_a_version_is_announced_when_its_copy_has_ended(model_folders, bench, monkeypatch):
    pending = Pending()
    monkeypatch.setattr(CpuCopy, "mark", lambda copy: pending)
    running = bench(Worker(None))
    assert running.publisher.offer(PolicyVersion(1), [("w", torch.zeros(4))]) is pending
    deadline = time.monotonic() + DEADLINE
    while not any(isinstance(message, Hello) for message in running.service.received):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not running.publisher.ready(0.5)
    assert not any(isinstance(message, Announce) for message in running.service.received)
    pending.ended.set()
    while not any(isinstance(message, Announce) for message in running.service.received):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_copy_that_does_not_end_reaches_the_training_loop(model_folders, bench, monkeypatch):
    monkeypatch.setattr(CpuCopy, "mark", lambda copy: Pending())
    running = bench(Worker(None))
    run = running.config.run.model_copy(update={"silence_timeout": 0.2})
    running.publisher._config = running.config.model_copy(update={"run": run})
    running.publisher.offer(PolicyVersion(1), [("w", torch.zeros(4))])
    with pytest.raises(RuntimeError, match=r"version 1\.0 was not copied in run\.silence_timeout=0\.2 s"):
        running.publisher.wait(DEADLINE)


def test_no_version_is_staged_over_one_that_the_thread_has_not_taken(bench, monkeypatch):
    monkeypatch.setattr(Publisher, "_round", lambda *_: None)
    running = bench(Worker(None))
    run = running.config.run.model_copy(update={"silence_timeout": 0.2})
    running.publisher._config = running.config.model_copy(update={"run": run})
    running.publisher.offer(PolicyVersion(1), [("w", torch.zeros(4))])
    with pytest.raises(RuntimeError, match=r"the publisher did not finish in run\.silence_timeout=0\.2 s"):
        running.publisher.offer(PolicyVersion(2), [("w", torch.ones(4))])


def test_closing_gives_up_a_transfer_and_says_bye(backend, model_folders, bench):
    weights = load_file(model_folders[1] / "model.safetensors")
    running = bench(Worker(None, dead=("dead",)))
    running.publisher.offer(PolicyVersion(1), weights.items())
    deadline = time.monotonic() + DEADLINE
    while not running.published():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    running.publisher.close()
    assert "publisher" not in {thread.name for thread in threading.enumerate()}
    while not any(isinstance(message, Bye) for message in running.service.received):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_failure_of_the_thread_reaches_the_training_loop(model_folders, bench, tmp_path):
    weights = load_file(model_folders[1] / "model.safetensors")
    running = bench(Worker(None))
    (tmp_path / "weights").write_text("a file where the kept versions should go")
    running.publisher.offer(PolicyVersion(2), weights.items())
    with pytest.raises(RuntimeError, match="the publisher has failed"):
        running.publisher.wait(DEADLINE)


def test_a_service_that_was_started_again_is_told_the_newest_version(model_folders, bench):
    weights = load_file(model_folders[1] / "model.safetensors")
    running = bench(Worker(None, dead=("dead",)))
    running.publisher.offer(PolicyVersion(1), weights.items())
    received = running.service.received
    _until(lambda: any(isinstance(message, Publish) for message in received))
    time.sleep(1.0)  # learner.tick, within which one greeting is enough
    received.clear()
    running.worker.forgets = True
    _until(lambda: any(isinstance(message, Publish) for message in received))
    assert received[:2] == [
        Hello(run=running.publisher._run, role="publisher", name="publisher", version=PolicyVersion(1)),
        Announce(version=PolicyVersion(1)),
    ]
    assert running.publisher.statistics.failed == 1  # what was under way is begun again


def test_a_publisher_to_whom_the_list_of_the_servers_was_lost_introduces_itself_again(model_folders, tmp_path):
    """The only word of the service is lost with a connection: nothing that follows would show it."""
    service = ScriptedService(tmp_path)
    tree = {
        "model": {"path": model_folders[0]},
        "stream": {"reply_timeout": 0.5, "curve": "off"},
        "publish": {"bucket": 1 << 16},
    }
    events = EventLog(event_path(tmp_path, "learner"), "learner-0")
    publisher = Publisher(Config.model_validate(tree), tmp_path, PolicyVersion(0), events)
    try:
        service.wait_until(lambda: sum(isinstance(word, Hello) for word in service.received) == 2)
    finally:
        publisher.close()
        events.close()
        service.close()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

"""A worker with several servers: which of them takes a request, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.engine.server import Server, ServerFailed
from streamrl.generate import fleet as fleet_module
from streamrl.generate.fleet import Fleet
from streamrl.generate.pauses import Reason
from streamrl.generate.served import ServedModel
from streamrl.observe.events import EventLog, event_path
from streamrl.publish.publisher import Publisher
from streamrl.stream.messages import Progress
from streamrl.types import PolicyVersion, Sample
from tests.operations_table import GOES_ON, documented

DEADLINE = 300.0  # seconds; two servers start at once on busy cores
STEPS = 100_000  # more than anyone waits for
BEHIND = 3  # steps behind the restart
PROMPT = [1, 4, 2, 8]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 4, "ignore_eos": True}
V1, V2 = PolicyVersion(1), PolicyVersion(2)


def twice(server: Server, folder: Path, model: Path, **generate: object) -> tuple[Config, EventLog]:
    """The configuration of a worker that is attached to one server by two names."""
    far = server.address.replace("127.0.0.1", "localhost")
    attached = {"servers": 2, "attach": (server.address, far), **generate}
    config = Config.model_validate({"model": {"path": model}, "generate": attached})
    return config.of_worker(0), EventLog(event_path(folder, "generator"), "generator-0")


def with_fleet(config: Config, folder: Path, events: EventLog, job: Callable[[Fleet], Any]) -> None:
    async def run() -> None:
        fleet = Fleet(config, folder, 0, events)
        try:
            await fleet.start()
            await job(fleet)
        finally:
            await fleet.close()
            events.close()

    asyncio.run(run())


def test_a_request_goes_to_a_server_that_has_its_version_and_waits_where_there_is_none(
    fresh_server: Server, model_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    config, events = twice(fresh_server, tmp_path, model_folders[0])

    async def job(fleet: Fleet) -> None:
        assert [state.name for state in fleet.states] == ["server-0-0", "server-0-1"]
        first, second = fleet.servers.values()
        groups = [fleet.choose(group, PolicyVersion(0), None) for group in range(4)]
        assert [place.server for place in groups if place] == ["server-0-0", "server-0-1"] * 2
        fleet.set_version(second, V1)
        assert fleet.choose(0, V1, None)[:2] == ("server-0-1", V1)
        waiting = asyncio.create_task(fleet.policy(7, V2).generate(PROMPT, SAMPLING, 2))
        late = asyncio.create_task(fleet.at_least(V2, asyncio.get_running_loop().time() + 60))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert not late.done()
        fleet.set_version(first, PolicyVersion(2, 1))
        answers = await waiting
        await late
        assert [len(answer.output_ids) for answer in answers] == [4, 4]
        assert fleet.version == PolicyVersion(2, 1)

    with_fleet(config, tmp_path, events, job)


def test_a_lost_server_is_told_and_comes_back_for_requests_with_the_newest_version_alone(
    fresh_server: Server, model_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_PAUSE", 0.01)
    config, events = twice(fresh_server, tmp_path, model_folders[0])
    told: list[list[str]] = []

    async def job(fleet: Fleet) -> None:
        async def announce() -> None:
            told.append([f"{state.name} {state.version}" for state in fleet.states])

        first, second = fleet.servers.values()
        for served in (first, second):
            fleet.set_version(served, V1)
        keeping = asyncio.create_task(fleet.keep(announce))
        first.check = failing("it is gone")  # type: ignore[method-assign]
        async with asyncio.timeout(DEADLINE):
            while len(told) < 2:
                await asyncio.sleep(0.05)
        assert told == [["server-0-1 1.0"], ["server-0-1 1.0", "server-0-0 0.0"]]
        again = fleet.servers["server-0-0"]
        assert again is not first
        assert fleet.choose("group", PolicyVersion(0), None).server == "server-0-1"
        assert fleet.choose("other", PolicyVersion(0), None).server == "server-0-1"
        fleet.set_version(again, V1)
        assert fleet.choose("third", PolicyVersion(0), None).server == "server-0-0"
        keeping.cancel()

    with_fleet(config, tmp_path, events, job)


def test_a_server_that_came_back_follows_a_learner_that_was_restored_behind_it(
    fresh_server: Server, model_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Server and learner died together: the version that the server should come back to is published no more."""
    config, events = twice(fresh_server, tmp_path, model_folders[0])

    async def job(fleet: Fleet) -> None:
        first, second = fleet.servers.values()
        for served in (first, second):
            fleet.set_version(served, PolicyVersion(20))
        for served in (first, second):
            fleet.lose_weights(served)
        assert [state.version for state in fleet.states] == [PolicyVersion(0)] * 2
        fleet.set_version(first, PolicyVersion(19))
        assert fleet.choose("group", PolicyVersion(0), None) is None
        fleet.set_version(first, PolicyVersion(15, incarnation=1))
        assert fleet.choose("group", PolicyVersion(0), None).server == "server-0-0"
        waiting = asyncio.create_task(fleet.at_least(PolicyVersion(16), asyncio.get_running_loop().time() + 60))
        await asyncio.sleep(0)
        assert not waiting.done()
        fleet.set_version(second, PolicyVersion(16, incarnation=1))
        await waiting
        assert fleet.choose("other", PolicyVersion(16), None).server == "server-0-1"

    with_fleet(config, tmp_path, events, job)


def test_a_server_for_which_there_is_no_process_now_is_started_later(
    fresh_server: Server, model_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_PAUSE", 0.01)
    config, events = twice(fresh_server, tmp_path, model_folders[0])

    async def job(fleet: Fleet) -> None:
        told: list[int] = []
        life, lacks = fleet._life, [OSError(11, "Resource temporarily unavailable"), ServerFailed("no process")]

        async def announce() -> None:
            told.append(len(fleet.states))

        def scarce(place: int) -> ServedModel:
            if lacks:
                raise lacks.pop()
            return life(place)

        monkeypatch.setattr(fleet, "_life", scarce)
        first = fleet.servers["server-0-0"]
        keeping = asyncio.create_task(fleet.keep(announce))
        first.fail("is gone")
        async with asyncio.timeout(DEADLINE):
            while told != [1, 2] and not keeping.done():
                await asyncio.sleep(0.05)
        assert (told, lacks) == ([1, 2], [])
        keeping.cancel()

    with_fleet(config, tmp_path, events, job)


def test_the_worker_fails_when_its_last_server_is_given_up(
    fresh_server: Server, model_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    config, events = twice(fresh_server, tmp_path, model_folders[0], restarts=0)

    async def nothing() -> None:
        return

    async def job(fleet: Fleet) -> None:
        first, second = fleet.servers.values()
        keeping = asyncio.create_task(fleet.keep(nothing))
        first.check = failing("the first is gone")  # type: ignore[method-assign]
        async with asyncio.timeout(DEADLINE):
            while len(fleet.states) == 2:
                await asyncio.sleep(0.05)
            assert not keeping.done()
            second.check = failing("the second is gone")  # type: ignore[method-assign]
            with pytest.raises(ExceptionGroup) as raised:
                await keeping
        assert "the second is gone" in str(raised.value.exceptions[0])

    with_fleet(config, tmp_path, events, job)


class Unkillable(Server):
    """A server whose process the kernel does not end."""

    def __init__(self, folder: Path) -> None:
        """The process has ended, so that nothing else is killed in its place."""
        self.log, self.scratch, self.address = folder / "server.log", folder / "scratch", "http://127.0.0.1:1"
        self._reserved, self._segments = socket.socket(), set()
        self._meeting = self._further = None
        self._is_ended = False
        self._process = subprocess.Popen([sys.executable, "-c", ""])
        self._process.wait()
        self._process.wait = self._never  # type: ignore[method-assign]

    def _never(self, timeout: float | None = None) -> int:
        assert timeout is not None
        raise subprocess.TimeoutExpired("sglang", timeout)


def test_a_server_that_cannot_be_killed_costs_the_worker_none_of_its_others(
    fresh_server: Server,
    model_folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_PAUSE", 0.01)
    config, events = twice(fresh_server, tmp_path, model_folders[0])

    async def job(fleet: Fleet) -> None:
        told: list[int] = []

        async def announce() -> None:
            told.append(len(fleet.states))

        first = fleet.servers["server-0-0"]
        first._process = Unkillable(tmp_path)
        keeping = asyncio.create_task(fleet.keep(announce))
        first.fail("does not answer")
        async with asyncio.timeout(DEADLINE):
            while told != [1, 2] and not keeping.done():
                await asyncio.sleep(0.05)
        assert told == [1, 2]  # without it, and with the one in its place
        answers = await fleet.policy("group", PolicyVersion(0)).generate(PROMPT, SAMPLING, 2)
        assert [len(answer.output_ids) for answer in answers] == [4, 4]
        assert not keeping.done()
        keeping.cancel()

    with_fleet(config, tmp_path, events, job)
    documented("process ... was killed and has not ended in ... s: ...", caplog.text, GOES_ON)


def test_a_server_comes_up_within_the_servers_turn_and_the_learners_begins_behind_it(
    fresh_server: Server, model_folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_PAUSE", 0.01)
    config, events = twice(fresh_server, tmp_path, model_folders[0])
    start = ServedModel.start

    async def nothing() -> None:
        return

    async def job(fleet: Fleet) -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def late(served: ServedModel, *, patient: bool = False) -> None:
            begun.set()
            await go_on.wait()
            await start(served, patient=patient)

        monkeypatch.setattr(ServedModel, "start", late)
        keeping = asyncio.create_task(fleet.keep(nothing))
        async with asyncio.timeout(DEADLINE):
            await fleet.sleep()
            lost = fleet.servers["server-0-0"]
            lost.fail("is gone")
            while "server-0-0" in fleet.servers:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.1)  # longer than the pause before it is started again
            assert not begun.is_set()
            await fleet.wake()
            await begun.wait()
            sleeping = asyncio.create_task(fleet.sleep())
            await asyncio.sleep(0.1)
            assert not sleeping.done()
            go_on.set()
            await sleeping
            again = fleet.servers["server-0-0"]
            assert again is not lost
            assert all(served._pauses.holds(Reason.ASLEEP) for served in fleet.servers.values())
            await fleet.wake()
        keeping.cancel()

    with_fleet(config, tmp_path, events, job)


def failing(reason: str) -> Callable[[], None]:
    def check() -> None:
        raise ServerFailed(reason)

    return check


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_servers_requests_finish_at_the_other_and_it_comes_back_with_the_present_version(
    start_run: Callable[..., Any], model_folders: tuple[Path, Path], forward_logprobs: Callable[..., torch.Tensor]
) -> None:
    run = start_run(steps=STEPS, servers=2, probes=0, sampling={"max_new_tokens": 96}, stream_every=16)
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    events = EventLog(event_path(run.folder, "learner"), "learner-0")
    publisher = Publisher(run.config, run.folder, PolicyVersion(0), events)
    samples: list[Sample] = []
    killed, behind, step = 0.0, 0, 0
    deadline = time.monotonic() + 2 * DEADLINE
    try:
        while behind < BEHIND:
            assert time.monotonic() < deadline
            publisher.offer(PolicyVersion(step), weights[step % 2].items())
            batch = run.batch(step)
            samples += batch.samples if step < 12 or behind else ()
            assert all(step - sample.oldest.step <= 1 for sample in batch.samples)
            step += 1
            run.dealer.send(Progress(version=PolicyVersion(step)))
            if step == 3:
                launches = psutil.Process(run.worker.pid).children()
                assert len(launches) == 2
                launches[0].send_signal(signal.SIGKILL)
                killed = time.time()
            behind += bool(run.events("generator", "server.restarted"))
        assert publisher.wait(DEADLINE)
    finally:
        publisher.close()
        events.close()

    (lost,), (restarted,) = run.events("generator", "server.lost"), run.events("generator", "server.restarted")
    assert lost["server"] == restarted["server"]
    assert killed <= lost["time"] <= restarted["time"]
    applied = [
        event
        for event in run.events("generator", "publish.apply")
        if event["phase"] == "end" and event["server"] == lost["server"] and event["time"] > restarted["time"]
    ]
    assert applied, "the server that came back got no version"
    assert not any(sample.is_placeholder for sample in samples)
    assert run.worker.poll() is None
    for sample in samples:
        for span in sample.spans:
            ids = (*sample.prompt_ids, *sample.output_ids)
            expected = forward_logprobs(weights[span.version.step % 2], ids)[len(sample.prompt_ids) - 1 :]
            difference = expected - torch.from_numpy(sample.logprobs.copy())
            assert difference[span.start : span.end].abs().max() < 1e-4

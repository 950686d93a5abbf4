"""A real worker process with a real SGLang server at a real replay service; the test is the learner."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.engine.client import EngineClient
from streamrl.engine.server import Server
from streamrl.observe.events import EventLog, event_path, read_events
from streamrl.publish.kept import kept_versions
from streamrl.publish.publisher import Publisher
from streamrl.stream.address import replay_address
from streamrl.stream.messages import Finished, Hello, Next, Progress
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import Batch, PolicyVersion

DEADLINE = 200.0  # seconds; the start of a server on busy cores
STEPS = 6


class Run:
    """The service and one worker as processes, and a learner that trains nothing."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        for name in ("events", "logs"):
            (folder / name).mkdir(parents=True)
        config_file.save(config, folder / "config.yaml")
        self.service = self._role("replay")
        self.worker = self._role("generator")
        self.dealer = Dealer(replay_address(config, folder), config.stream, name="learner")
        self.dealer.send(Hello(role="learner", name="learner", version=PolicyVersion(0)))

    def _role(self, name: str) -> subprocess.Popen[bytes]:
        with (self.folder / "logs" / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "streamrl.cli", name, "--run", str(self.folder)]
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text()

    def batch(self, step: int) -> Batch:
        self.dealer.send(Next(step=step))
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            received = self.dealer.receive(0.2)
            if isinstance(received, ReceivedBatch):
                return received.batch
            assert self.worker.poll() is None, self.log("generator")
            assert self.service.poll() is None, self.log("replay")
        raise AssertionError(f"no batch; worker: {self.log('generator')} service: {self.log('replay')}")

    def events(self, role: str, name: str) -> list[dict]:
        return [event for event in read_events(event_path(self.folder, role)) if event["event"] == name]

    def end(self) -> None:
        self.dealer.close()
        for process in (self.worker, self.service):
            if process.poll() is None:
                process.kill()
            process.wait()


def _shared_memory(pid: int) -> set[Path]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split(maxsplit=5)[5]) for line in maps if "/dev/shm/" in line}


@pytest.fixture
def start_run(model_folders: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(**generate: object) -> Run:
        config = Config.model_validate(
            {
                "run": {"name": "run", "folder": tmp_path, "steps": STEPS, "start_timeout": DEADLINE},
                "model": {"path": model_folders[0]},
                "task": {"name": "copy"},
                "generate": {"group_size": 4, "groups_in_flight": 8, "sampling": {"max_new_tokens": 8}, **generate},
                "replay": {"groups_per_step": 4, "max_staleness": 1},
                "publish": {"keep_every": 1, "bucket": 1 << 16, "timeout": 30},
            }
        )
        runs.append(Run(config, tmp_path / "run"))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


def test_a_worker_generates_groups_takes_in_versions_and_leaves_nothing_behind(
    start_run: Callable[..., Run], model_folders: tuple[Path, Path], forward_logprobs: Callable[..., torch.Tensor]
) -> None:
    run = start_run(probes=2)
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    events = EventLog(event_path(run.folder, "learner"), "learner-0")
    publisher = Publisher(run.config, run.folder, PolicyVersion(0), events)
    batches = []
    try:
        for step in range(STEPS):
            publisher.offer(PolicyVersion(step), weights[step % 2].items())
            batches.append(run.batch(step))
            run.dealer.send(Progress(version=PolicyVersion(step + 1)))
        children = {child.pid for child in psutil.Process(run.worker.pid).children(recursive=True)}
        segments = {path for pid in children for path in _shared_memory(pid)}
        publisher.offer(PolicyVersion(STEPS), weights[STEPS % 2].items())
        assert publisher.wait(DEADLINE)
        run.dealer.send(Finished(version=PolicyVersion(STEPS)))
        assert run.worker.wait(DEADLINE) == 0, run.log("generator")
    finally:
        publisher.close()
        events.close()

    samples = [sample for batch in batches for sample in batch.samples]
    assert len(samples) == STEPS * 4 * 4
    assert not any(sample.is_placeholder for sample in samples)
    for batch in batches:
        for sample in batch.samples:
            assert batch.step - sample.oldest.step <= 1
    for sample in samples:
        for span in sample.spans:
            ids = (*sample.prompt_ids, *sample.output_ids)
            expected = forward_logprobs(weights[span.version.step % 2], ids)[len(sample.prompt_ids) - 1 :]
            difference = expected - torch.from_numpy(sample.logprobs.copy())
            assert difference[span.start : span.end].abs().max() < 1e-4
    assert len({span.version for sample in samples for span in sample.spans}) >= 3
    assert [(event["moment"], event["index"]) for event in run.events("generator", "probe")] == [
        ("start", 0), ("start", 1), ("end", 0), ("end", 1)
    ]  # fmt: skip
    kept = kept_versions(run.folder)
    assert [version.step for version in sorted(kept)] == list(range(STEPS + 1))
    for version, folder in kept.items():
        stored = load_file(folder / "model.safetensors")
        assert all(torch.equal(stored[name], tensor) for name, tensor in weights[version.step % 2].items())
    assert children
    assert segments
    assert not any(psutil.pid_exists(pid) for pid in children)
    assert not any(path.exists() for path in segments)


def test_an_attached_server_is_brought_to_the_initial_weights_and_outlives_the_worker(
    start_run: Callable[..., Run], fresh_server: Server
) -> None:
    async def rename_and_ask(version: str | None) -> str:
        client = EngineClient(fresh_server.address, timeout=60)
        try:
            if version is not None:  # what a worker that died in the middle of an update leaves
                await client.update_weight_version(version)
            return (await client.model_info()).weight_version
        finally:
            await client.close()

    asyncio.run(rename_and_ask("7.0-partial"))
    run = start_run(attach=(fresh_server.address,), probes=0)
    batch = run.batch(0)
    assert {span.version for sample in batch.samples for span in sample.spans} == {PolicyVersion(0)}
    run.worker.send_signal(signal.SIGTERM)
    assert run.worker.wait(DEADLINE) == 0
    assert [event["tickets"] for event in run.events("replay", "worker.gone")] == [0]  # what was begun is finished
    assert not run.events("generator", "worker.undrained")
    assert asyncio.run(rename_and_ask(None)) == "0.0"


def test_a_worker_whose_server_dies_ends_with_the_last_lines_of_the_servers_log(
    start_run: Callable[..., Run],
) -> None:
    run = start_run(probes=0)
    run.batch(0)
    (launch,) = psutil.Process(run.worker.pid).children()
    segments = {path for child in launch.children(recursive=True) for path in _shared_memory(child.pid)}
    assert any(path.name.startswith("sglang_") for path in segments)
    launch.send_signal(signal.SIGKILL)
    assert run.worker.wait(60) == 1
    assert "last lines of" in run.log("generator")
    assert "server-0.log" in run.log("generator")
    assert not [path for path in segments if path.exists()]

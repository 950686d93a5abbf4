"""What tests of the worker share: a run of which the test is the learner."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.observe.events import event_path, read_events
from streamrl.stream.address import replay_address
from streamrl.stream.identity import run_identity
from streamrl.stream.keys import key_folder
from streamrl.stream.messages import Hello, Next
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import Batch, PolicyVersion

DEADLINE = 300.0  # seconds; the start of two servers on busy cores
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
        self.dealer = Dealer(replay_address(config, folder), config.stream, key_folder(config, folder), "learner")
        self.begin(PolicyVersion(0))

    def begin(self, version: PolicyVersion) -> None:
        """A learner starts at this version."""
        run = run_identity(self.folder).id
        self.dealer.send(Hello(run=run, role="learner", name="learner", version=version))

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


@pytest.fixture
def start_run(model_folders: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(
        *,
        steps: int = STEPS,
        publish: object = (),
        journal: object = (),
        run: object = (),
        replay: object = (),
        stream: object = (),
        **generate: object,
    ) -> Run:
        config = Config.model_validate(
            {
                "run": {"name": "run", "folder": tmp_path, "steps": steps, "start_timeout": DEADLINE, **dict(run)},
                "model": {"path": model_folders[0]},
                "task": {"name": "copy"},
                "generate": {"group_size": 4, "groups_in_flight": 8, "sampling": {"max_new_tokens": 8}, **generate},
                "replay": {"groups_per_step": 4, "max_staleness": 1, **dict(replay)},
                "stream": dict(stream),
                "publish": {"keep_every": 1, "bucket": 1 << 16, "timeout": 30, **dict(publish)},
                "journal": dict(journal),
            }
        )
        runs.append(Run(config, tmp_path / "run"))
        return runs[-1]

    yield start
    for run in runs:
        run.end()

"""The real learner and the real replay service: a damaged checkpoint, and two runs on one address."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.fault_roles import make_group, serve_tickets
from streamrl import run_folder
from streamrl.config import Config
from streamrl.learner import checkpoint
from streamrl.observe.events import event_path, read_events
from streamrl.observe.metrics import read_metrics
from streamrl.stream.identity import run_identity
from streamrl.types import Group, PolicyVersion, Ticket
from tests.operations_table import documented

PATIENCE = 180.0  # seconds for anything that must come, on busy cores
STEPS = 20
VOCABULARY = 10  # of the tiny model


def make_config(model: Path, folder: Path, name: str) -> Config:
    return Config.model_validate(
        {
            "run": {"folder": folder, "name": name, "steps": STEPS},
            "model": {"path": model},
            "generate": {"group_size": 2, "heartbeat": 0.2},
            "replay": {"groups_per_step": 2, "max_staleness": 1},
            "journal": {"segment": 4096},
            "stream": {"curve": "off"},  # with keys of their own two runs do not even reach each other's words
            "learner": {"tick": 0.1, "tokens_per_micro_batch": 256},
            "checkpoint": {"every": 1},
            "publish": {"transport": "disk"},
        }
    )


class Run:
    """One run's folder and the processes of it that a test starts."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = run_folder.prepare(config, fresh=False)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, role: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "streamrl.cli", role, "--run-folder", str(self.folder)]
        with self.log(role).open("wb") as output:
            self.processes.append(
                subprocess.Popen([*command, "--lifeline", str(os.getpid())], stdout=output, stderr=output)
            )
        return self.processes[-1]

    def log(self, role: str) -> Path:
        return self.folder / "logs" / f"{role}.log"

    def generate(self) -> None:
        """A worker by the real protocol, whose answers are random tokens."""

        async def answer(ticket: Ticket, version: Callable[[], PolicyVersion]) -> Group:
            group = make_group(ticket, version(), self.config.generate.group_size, "generator-0")
            samples = (replace(sample, output_ids=sample.output_ids % VOCABULARY) for sample in group.samples)
            return replace(group, samples=tuple(samples))

        work = serve_tickets(self.config, self.folder, 0, answer)
        threading.Thread(target=lambda: asyncio.run(work), daemon=True).start()

    def events_of(self, role: str, event: str) -> list[dict[str, Any]]:
        path = event_path(self.folder, role)
        return [each for each in read_events(path) if each["event"] == event] if path.exists() else []

    def steps(self) -> list[int]:
        return [row["step"] for row in read_metrics(self.folder)]


@pytest.fixture
def make_run(model_folders: Sequence[Path], tmp_path: Path) -> Iterator[Callable[[str], Run]]:
    runs: list[Run] = []

    def make(name: str) -> Run:
        runs.append(Run(make_config(model_folders[0], tmp_path, name)))
        return runs[-1]

    yield make
    for run in runs:
        for process in run.processes:
            process.kill()
            process.wait(PATIENCE)


def until(condition: Callable[[], bool], *alive: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in alive)
        time.sleep(0.05)


def flip(folder: Path) -> None:
    """One bit of the weights and moments of a checkpoint."""
    (path,) = folder.glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_a_killed_learner_with_a_damaged_checkpoint_trains_the_same_groups_from_the_one_before(
    make_run: Callable[[str], Run],
) -> None:
    run = make_run("run")
    service = run.start("replay")
    run.generate()
    learner = run.start("learner")
    until(lambda: len(run.steps()) >= 6, service, learner)
    learner.kill()
    learner.wait(PATIENCE)
    root = run.folder / "checkpoints"
    *_, older, newest = checkpoint.complete(root)
    assert newest.name != f"step_{STEPS}"
    flip(newest)

    assert run.start("learner").wait(PATIENCE) == 0, run.log("learner").read_text()
    (damage,) = run.events_of("learner", "checkpoint.damaged")
    assert damage["told"] in run.log("learner").read_text()
    assert damage["told"].endswith(f"{newest.name} is set aside, training goes on from {older.name}")
    assert run.events_of("learner", "ready")[-1]["version"] == f"{checkpoint.step_of(older)}.1"
    assert run.steps() == list(range(1, STEPS + 1))
    # The journal had deleted what no checkpoint needs, and still had every group behind the older one.
    assert run.events_of("replay", "journal.compacted")
    assert Counter(event["step"] for event in run.events_of("replay", "batch"))[checkpoint.step_of(older)] == 2
    accepted = Counter(event["group_id"] for event in run.events_of("replay", "group.accepted"))
    assert set(accepted.values()) == {1}
    assert set(range(2 * STEPS)) <= accepted.keys()

    for folder in checkpoint.complete(root):
        flip(folder)
    assert run.start("learner").wait(PATIENCE) == 2
    last = run.log("learner").read_text().splitlines()[-1]
    assert last.startswith(f"streamrl: {root}/step_{STEPS}/")
    assert "no checkpoint is left to resume from; allowed: " in last


@pytest.mark.slow
def test_two_runs_on_one_address_exchange_nothing(make_run: Callable[[str], Run]) -> None:
    own, other = make_run("own"), make_run("other")
    service = own.start("replay")
    address = own.folder / "replay.address"
    until(address.exists, service)
    shutil.copy(address, other.folder)
    ids = [run_identity(run.folder).id for run in (own, other)]
    code = other.start("learner").wait(PATIENCE)
    last = other.log("learner").read_text().splitlines()[-1]
    assert last.startswith(
        f"streamrl: learner-0 is of run {ids[1]}, and run {ids[0]} is served at this address; allowed"
    )
    documented("... is of run ..., and run ... is served at this address; allowed...", last, code)
    assert other.events_of("learner", "learner.refused")
    assert other.steps() == []

    own.generate()
    assert own.start("learner").wait(PATIENCE) == 0
    assert own.steps() == list(range(1, STEPS + 1))
    assert {event["run"] for event in own.events_of("replay", "replay.refused")} == {ids[1]}
    assert service.wait(PATIENCE) == 0

"""One run of the pressure benchmark: the real replay service, scripted workers and learner, and their records."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from benchmarks.faults import Process
from benchmarks.pressure_roles import Load, Seen, Slots, Trained, load_path, seen_path, trained_path
from streamrl.config import Config
from streamrl.config import file as config_file

Line = TypeVar("Line", Seen, Slots, Trained)

WORKERS = 2
PATIENCE = 60.0  # seconds in which a run must get further, or end


class Run:
    """The processes of one run, from their start to their end."""

    def __init__(self, folder: Path, load: Load, sections: dict[str, dict[str, Any]]) -> None:
        (folder / "logs").mkdir(parents=True)
        self.folder = folder
        self.config = make_config(folder, sections)
        config_file.save(self.config, folder / "config.yaml")
        load_path(folder).write_bytes(msgspec.json.encode(load))
        replay = ["-m", "streamrl.cli", "replay", "--run-folder", str(folder), "--lifeline", str(os.getpid())]
        roles = ["-m", "benchmarks.pressure_roles"]
        self.service = self._process("service", replay)
        self.learner = self._process("learner", [*roles, "learner", str(folder)])
        self.workers = [
            self._process(f"worker-{index}", [*roles, "worker", str(folder), str(index)]) for index in range(WORKERS)
        ]

    def go(self, until: Callable[[list[Trained]], bool], every: float = 0.25) -> list[Trained]:
        """Run until the learner's record is as it should be. Returns it. Raises TimeoutError, RuntimeError."""
        processes = [self.service, self.learner, *self.workers]
        try:
            for process in processes:
                process.start()
            steps, further = 0, time.monotonic()
            while not until(record := read(trained_path(self.folder), Trained)):
                if len(record) > steps:
                    steps, further = len(record), time.monotonic()
                self._check(processes, further)
                time.sleep(every)
            self._end(processes)
        finally:
            for process in processes:
                if process.process is not None and process.process.poll() is None:
                    process.kill()
        return record

    def resident(self) -> dict[str, int]:
        """Bytes of memory of the service and the workers."""
        found = {}
        for process in (self.service, *self.workers):
            assert process.process is not None
            found[process.name] = psutil.Process(process.process.pid).memory_info().rss
        return found

    def slots(self) -> int:
        """The most slots that were ever in use, by what the workers saw."""
        return largest_charge(
            (seen for index in range(WORKERS) for seen in read(seen_path(self.folder, index), Seen)),
            self.config.replay.groups_per_step,
        )

    def _end(self, processes: Sequence[Process]) -> None:
        """The service is ended, and tells the others."""
        assert self.service.process is not None
        self.service.process.terminate()
        for process in processes:
            assert process.process is not None
            if code := process.process.wait(PATIENCE):
                raise RuntimeError(f"{process.name} ended with {code}:\n{process.log.read_text()[-2000:]}")

    def _check(self, processes: Iterable[Process], further: float) -> None:
        for process in processes:
            assert process.process is not None
            if process.process.poll() is not None:
                raise RuntimeError(f"{process.name} ended by itself:\n{process.log.read_text()[-2000:]}")
        if time.monotonic() - further > PATIENCE:
            raise TimeoutError(f"no learner step in {PATIENCE:g} s; see {self.folder}")

    def _process(self, name: str, arguments: list[str]) -> Process:
        return Process(name, [sys.executable, *arguments], self.folder / "logs" / f"{name}.log")


def make_config(folder: Path, sections: dict[str, dict[str, Any]]) -> Config:
    defaults: dict[str, dict[str, Any]] = {
        "run": {"name": folder.name, "folder": folder.parent, "steps": 1_000_000, "silence_timeout": PATIENCE},
        "generate": {"workers": WORKERS, "group_size": 8, "groups_in_flight": 32, "heartbeat": 0.2},
        "replay": {"groups_per_step": 8},
        "journal": {"segment": 1 << 24},
        "learner": {"tick": 0.05},
        "checkpoint": {"every": 10},
        "publish": {"timeout": PATIENCE / 4},
    }
    return Config.model_validate({name: values | sections.get(name, {}) for name, values in defaults.items()})


def read(path: Path, kind: type[Line]) -> list[Line]:
    """The lines of a record; one that is still being written is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [msgspec.json.decode(line, type=kind) for line in lines if line.endswith(b"\n")]


def largest_charge(seen: Iterable[Seen], groups_per_step: int) -> int:
    """Groups that were out or held and not in weights that a server had, at the worst moment."""
    newest = largest = 0
    for line in sorted(seen, key=lambda line: line.clock):
        if line.step is not None:
            newest = max(newest, line.step)
        if line.group_id is not None:
            largest = max(largest, line.group_id + 1 - newest * groups_per_step)
    return largest

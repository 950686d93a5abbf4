"""A run of the product itself: `streamrl train` in a process of its own, what it leaves, and what is done to it."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.device_map import DeviceMap, device_map
from streamrl.lab.acceptance.check import Bench, Failed, Skipped
from streamrl.lifeline import die_with, end_tree
from streamrl.observe.events import role_events
from streamrl.observe.metrics import read_metrics

POLL = 0.1  # seconds between two looks at a run
STOP = 30.0  # seconds that a run may take to end at SIGTERM, `run.stop_timeout`
LINES = 3  # last lines of a log that a reason quotes

Victim = Literal["server", "generator", "learner"]

# Words of the command lines of a run's processes.
WORDS: dict[Victim, str] = {
    "server": "streamrl.engine.launch",
    "generator": "streamrl.cli generator",
    "learner": "streamrl.cli learner",
}

MAPPINGS = ("task.args", "generate.server_args")  # keys whose values are mappings

# Enough to have requests in flight at every update, and over in seconds with a tiny model.
SETTINGS: dict[str, Any] = {
    "run.restarts": 2, "run.start_timeout": 480.0, "run.stop_timeout": 30.0,
    "task.name": "copy", "task.args": {"length": 3, "alphabet": "abcdefgh"},
    "generate.group_size": 8, "generate.groups_in_flight": 16, "generate.probes": 0,
    "generate.sampling.max_new_tokens": 24,
    "replay.groups_per_step": 8, "replay.max_staleness": 2,
    "journal.keep": "all", "publish.keep_every": 1, "publish.timeout": 60.0, "checkpoint.every": 2,
    "learner.optimizer.lr": 1e-3, "observe.console": False,
}  # fmt: skip


def _in_turns(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What lets learner and server share the one GPU. Raises Skipped for a run that cannot."""
    interruption = settings.get("publish.interruption", "retract")
    if interruption != "retract":
        raise Skipped(f"one GPU: learner and server take turns, and no request is in flight for {interruption}")
    return {"run.placement": "shared", "publish.transport": "memory"}


class Trial:
    """One run folder, and the process that works in it. End it by leaving the block.

    Usage:
        with Trial(bench, "kill", {"run.steps": 6}) as trial:
            trial.start()
            trial.reach(2)
            trial.kill("server")
            trial.finish()
    """

    def __init__(self, bench: Bench, name: str, settings: Mapping[str, Any], *, model: Path | None = None) -> None:
        """Raises Skipped where this machine has too few GPUs for such a run. On one, both sides take turns."""
        chosen = {**SETTINGS, "run.name": name, "run.folder": str(bench.folder / "runs"), "model.dtype": bench.dtype}
        chosen |= {"model.path": str(model or bench.tiny), **settings}
        if len(bench.gpus) == 1:
            chosen |= _in_turns(chosen)
        self.bench = bench
        self.folder = bench.folder / "runs" / name
        self.file = _written(bench, name, chosen)
        self._log = bench.folder / "logs" / f"{name}.train.log"
        self._process: psutil.Popen | None = None
        self.placed = DeviceMap((), ())
        self.config = self.configured()

    def configured(self, *more: str) -> Config:
        """The configuration with further overrides. Raises Skipped as the constructor does."""
        config = config_file.load(self.file, more)
        if self.bench.gpus:
            try:
                self.placed = device_map(config, len(self.bench.gpus))
            except ConfigError as error:
                raise Skipped(str(error).partition("; allowed")[0]) from None
        return config

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            end_tree(self._process.pid, timeout=STOP)

    def start(self, *more: str, environment: Mapping[str, str] | None = None) -> None:
        """`streamrl train`, with further overrides; it ends with this process."""
        self.configured(*more)
        command = [sys.executable, "-m", "streamrl.cli", "train", str(self.file), *more]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            self._process = psutil.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})}, preexec_fn=functools.partial(die_with, os.getpid()),
            )  # fmt: skip

    def finish(self) -> None:
        """Until the run has ended. Raises Failed, with what its log says, where that is not 0.

        The deadline is the check's own.
        """
        assert self._process is not None
        if (code := self._process.wait()) != 0:
            raise Failed(f"`streamrl train` ended with {code}: {self._last_lines()}")

    def reach(self, step: int) -> None:
        """Until `step` is trained. Raises Failed where the run ends before."""
        self.until(lambda: self.step >= step)

    def until(self, condition: Callable[[], bool]) -> None:
        """Raises Failed where the run ends before."""
        assert self._process is not None
        while not condition():
            if self._process.poll() not in (None, 0):
                raise Failed(f"`streamrl train` ended with {self._process.returncode}: {self._last_lines()}")
            if self._process.poll() == 0 and not condition():
                raise Failed("the run was over before anything could be done to it")
            time.sleep(POLL)

    def kill(self, victim: Victim) -> None:
        """SIGKILL to one process of the run. Raises Failed where there is none."""
        assert self._process is not None
        for process in self._process.children(recursive=True):
            line = _command_line(process)
            if WORDS[victim] in line and "distributed.run" not in line:  # torchrun quotes the line of its ranks
                killed = time.time()
                process.send_signal(signal.SIGKILL)
                _kill_file(self.bench, self.folder.name).write_text(str(killed))
                return
        raise Failed(f"the run has no {victim} that could be killed")

    @property
    def step(self) -> int:
        """The last learner step that is in the metrics."""
        return max((int(row["step"]) for row in self.rows()), default=0)

    def rows(self) -> list[dict[str, Any]]:
        return list(read_metrics(self.folder))

    def events(self, role: str, name: str) -> Iterator[dict[str, Any]]:
        """The events of one name of the first process of a role, spans by their ends."""
        for event in role_events(self.folder, role):
            if event["event"] == name and event.get("phase") != "begin":
                yield event

    def _last_lines(self) -> str:
        return last_lines(self._log)


def record_of(bench: Bench, name: str) -> Trial:
    """A run that another check has made, with the settings that it was made with."""
    recorded = yaml.safe_load((bench.folder / "configs" / f"{name}.yaml").read_text())
    return Trial(bench, name, _dotted(recorded))


def killed_at(bench: Bench, name: str) -> float:
    """When a process of this run was killed, in seconds since the epoch."""
    return float(_kill_file(bench, name).read_text())


def _kill_file(bench: Bench, name: str) -> Path:
    return bench.folder / "configs" / f"{name}.killed"


@contextmanager
def ended(bench: Bench, name: str, settings: Mapping[str, Any], *, model: Path | None = None) -> Iterator[Trial]:
    """A run from its start to its end, undisturbed."""
    with Trial(bench, name, settings, model=model) as trial:
        trial.start()
        trial.finish()
        yield trial


def command(bench: Bench, name: str, *words: str, environment: Mapping[str, str] | None = None) -> str:
    """Another command of the product, to its end. Returns what it printed. Raises Failed where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})}, preexec_fn=functools.partial(die_with, os.getpid()),
    )  # fmt: skip
    log = bench.folder / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(done.stdout + done.stderr)
    if done.returncode:
        raise Failed(f"`streamrl {words[0]}` ended with {done.returncode}: {last_lines(log)}")
    return done.stdout


def last_lines(log: Path) -> str:
    """The end of a log on one line, and where all of it is."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"streamrl: ", line)] or lines
    return f"{' | '.join(told[-LINES:])} ({log})"


def _written(bench: Bench, name: str, chosen: Mapping[str, Any]) -> Path:
    """The configuration file of a run, of dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in chosen.items():
        *path, last = key.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    file = bench.folder / "configs" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(tree))
    return file


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The other way round; arguments stay mappings."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, dict) and f"{prefix}{key}" not in MAPPINGS
        found |= _dotted(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return found


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""

"""A run of the quickstart with a tiny model, as one `train` process, to which something is done from outside."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import psutil

from benchmarks.fault_evidence import events_of
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.observe.metrics import read_metrics

PATIENCE = 300.0  # seconds in which a run must train on; SGLang starts in 20 to 90 on two busy cores

Victim = Literal["generator", "server", "replay", "learner", "supervisor"]

# Words of the command lines of the processes, among the supervisor's descendants.
WORDS: dict[Victim, str] = {
    "generator": "streamrl.cli generator",
    "server": "streamrl.engine.launch",
    "replay": "streamrl.cli replay",
    "learner": "streamrl.cli learner",
}


class Quickstart:
    """One run folder, and the `train` process that works in it; at the end of the block it is ended.

    Usage:
        with Quickstart(folder, "kills", 120, "checkpoint.every=10") as run:
            run.start()
            run.train_on(0.0, 3)
            run.kill("learner")
    """

    def __init__(self, place: Path, name: str, steps: int, *settings: str) -> None:
        model = place / "model"
        if not model.exists():
            subprocess.run([sys.executable, "-m", "launch.tiny_model", str(model)], check=True, capture_output=True)
        self.folder = place / name
        self.steps = steps
        self._output = place / f"{name}.log"
        overrides = [f"run.folder={place}", f"run.name={name}", f"model.path={model}", f"run.steps={steps}"]
        overrides += ["observe.console=false", "generate.probes=1", *settings]
        self._command = [sys.executable, "-m", "streamrl.cli", "train", "configs/quickstart.yaml", *overrides]
        self.process: psutil.Popen | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(PATIENCE)

    @property
    def config(self) -> Config:
        """As the run has recorded it."""
        return config_file.load(self.folder / "config.yaml")

    def start(self, *settings: str) -> None:
        """`train`, with further settings than the first time."""
        with self._output.open("ab") as output:
            self.process = psutil.Popen(
                [*self._command, *settings], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def wait(self) -> int:
        """The exit code, once every step is trained or the run has failed."""
        assert self.process is not None
        return int(self.process.wait(PATIENCE))

    def step(self) -> int:
        """The last step that is in the metrics."""
        return max((int(row["step"]) for row in read_metrics(self.folder)), default=0)

    def reach(self, step: int, *, checkpoint: int) -> int:
        """Wait until `step` is trained, and the checkpoint of another one is complete. Returns the last trained one."""
        deadline = time.monotonic() + PATIENCE
        complete = self.folder / "checkpoints" / f"step_{checkpoint}"
        while self.step() < step or not complete.exists():
            self._check(deadline)
            time.sleep(0.02)
        return self.step()

    def train_on(self, since: float, steps: int) -> float:
        """Wait for `steps` rows written after `since`. Returns the time of the first, in seconds since the epoch."""
        deadline = time.monotonic() + PATIENCE
        while len(times := [row["time"] for row in read_metrics(self.folder) if row["time"] > since]) < steps:
            self._check(deadline)
            time.sleep(0.1)
        return float(times[0])

    def told_since(self, role: str, name: str, since: float) -> bool:
        role, _, index = role.rpartition("-")
        told = events_of(self.folder, role, int(index))
        return any(event["event"] == name and event["time"] > since for event in told)

    def kill(self, victim: Victim, *settings: str) -> float:
        """SIGKILL to one process, and `train` again, with `settings`, after that of the supervisor. Returns when."""
        assert self.process is not None
        process = self.process if victim == "supervisor" else self._descendant(WORDS[victim])
        killed = time.time()
        process.kill()
        if process is self.process:
            process.wait()
            self.start(*settings)
        return killed

    def _check(self, deadline: float) -> None:
        assert self.process is not None
        if self.process.poll() not in (None, -signal.SIGKILL):
            raise RuntimeError(f"`train` ended with {self.process.poll()}; see {self._output}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no learner step in {PATIENCE:g} s; see {self.folder / 'logs'}")

    def _descendant(self, word: str) -> psutil.Process:
        """The process whose command line has `word`; not torchrun, which quotes that of its ranks."""
        assert self.process is not None
        lines = {process: _command_line(process) for process in self.process.children(recursive=True)}
        return next(process for process, line in lines.items() if word in line and "distributed.run" not in line)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""

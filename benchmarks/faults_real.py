"""The quickstart with real SGLang and Megatron-Core, in which every kind of process is killed once, in turn.

    worker ─▶ SGLang server ─▶ replay service ─▶ learner rank ─▶ supervisor, and `train` again ─▶ the end, audited

After each kill the run is left alone until it has trained on. It must end with 0 at its last step, and the audit
must find that no guarantee was broken.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from streamrl.observe.events import read_events
from streamrl.observe.metrics import read_metrics

PATIENCE = 300.0  # seconds in which a run must train on after a kill; SGLang starts in 20 to 90 on two busy cores
IN_PEACE = 3  # learner steps between a recovery and the next kill


@dataclass(frozen=True)
class Victim:
    """A kind of process."""

    name: str
    word: str  # of its command line, among the supervisor's descendants
    role: str  # whose event is the end of the recovery
    event: str = "ready"


VICTIMS = (
    Victim("worker", "streamrl.cli generator", "generator-0"),
    Victim("SGLang server", "streamrl.engine.launch", "generator-0", "server.restarted"),
    Victim("replay service", "streamrl.cli replay", "replay-0"),
    Victim("learner rank", "streamrl.cli learner", "learner-0"),
    Victim("supervisor", "", "learner-0"),
)


class Quickstart:
    """One run folder, and the `train` process that works in it."""

    def __init__(self, folder: Path, steps: int) -> None:
        model = folder / "model"
        if not model.exists():
            subprocess.run([sys.executable, "-m", "launch.tiny_model", str(model)], check=True, capture_output=True)
        self.folder = folder / "faults"
        self._output = folder / "train.log"
        overrides = [f"run.folder={folder}", f"run.name={self.folder.name}", f"model.path={model}"]
        overrides += [f"run.steps={steps}", "checkpoint.every=10", "observe.console=false", "generate.probes=1"]
        self._command = [sys.executable, "-m", "streamrl.cli", "train", "configs/quickstart.yaml", *overrides]
        self.process: psutil.Popen | None = None

    def start(self) -> None:
        with self._output.open("ab") as output:
            self.process = psutil.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def step(self) -> int:
        """The last step that is in the metrics."""
        return max((int(row["step"]) for row in read_metrics(self.folder)), default=0)

    def train_on(self, since: float, steps: int) -> float:
        """Wait for `steps` rows written after `since`. Returns the time of the first, in seconds since the epoch."""
        deadline = time.monotonic() + PATIENCE
        while len(times := [row["time"] for row in read_metrics(self.folder) if row["time"] > since]) < steps:
            assert self.process is not None
            if self.process.poll() not in (None, -signal.SIGKILL):
                raise RuntimeError(f"`train` ended with {self.process.poll()}; see {self._output}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no learner step in {PATIENCE:g} s; see {self.folder / 'logs'}")
            time.sleep(0.1)
        return float(times[0])

    def told_since(self, role: str, name: str, since: float) -> bool:
        events = read_events(self.folder / "events" / f"{role}.jsonl")
        return any(event["event"] == name and event["time"] > since for event in events)

    def kill(self, victim: Victim) -> float:
        """SIGKILL to one process, and `train` again after that of the supervisor. Returns when."""
        assert self.process is not None
        process = self._descendant(victim.word) if victim.word else self.process
        killed = time.time()
        process.kill()
        if process is self.process:
            process.wait()
            self.start()
        return killed

    def _descendant(self, word: str) -> psutil.Process:
        """The process whose command line has `word`; not torchrun, which quotes that of its ranks."""
        assert self.process is not None
        lines = {process: _command_line(process) for process in self.process.children(recursive=True)}
        return next(process for process, line in lines.items() if word in line and "distributed.run" not in line)


def run(folder: Path | None, steps: int = 120) -> int:
    """Kill everything once. Prints a line for each, and the audit; returns 0 where the run ended as it should."""
    with _folder(folder) as place:
        quickstart = Quickstart(place, steps)
        quickstart.start()
        try:
            quickstart.train_on(0.0, IN_PEACE)
            for victim in VICTIMS:
                _kill_one(quickstart, victim)
            assert quickstart.process is not None
            code = quickstart.process.wait(PATIENCE)
        finally:
            if quickstart.process is not None and quickstart.process.poll() is None:
                quickstart.process.send_signal(signal.SIGINT)
                quickstart.process.wait(PATIENCE)
        trained = quickstart.step()  # before the folder goes
        print(f"`train` ended with {code} at step {trained} of {steps}", flush=True)
        audit = subprocess.run([sys.executable, "-m", "streamrl.cli", "audit", str(quickstart.folder)], check=False)
    return 0 if code == audit.returncode == 0 and trained == steps else 1


def _kill_one(quickstart: Quickstart, victim: Victim) -> None:
    before = quickstart.step()
    killed = quickstart.kill(victim)
    deadline = time.monotonic() + PATIENCE
    while not quickstart.told_since(victim.role, victim.event, killed):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{victim.role} was not ready {PATIENCE:g} s after the kill of the {victim.name}")
        time.sleep(0.1)
    ready = time.time()
    trained = quickstart.train_on(ready, 1)
    print(
        f"{victim.name:15} killed at step {before}: {victim.role} ready again after {ready - killed:.1f} s, "
        f"the next step after {trained - killed:.1f} s",
        flush=True,
    )
    quickstart.train_on(ready, IN_PEACE)


@contextmanager
def _folder(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.absolute()
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""

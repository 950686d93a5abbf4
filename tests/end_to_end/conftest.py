"""Real runs in processes of their own, on a tiny model: SGLang generates, Megatron-Core trains, ZeroMQ between."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from streamrl.observe.metrics import read_metrics
from tests.shared_memory import assert_none_is_left, nobodys

DEADLINE = 240.0  # seconds; a start of SGLang on two busy cores may take one of them
STEPS = 8
INTERRUPTED_STEPS = 20  # enough that the interruption comes before the end on a fast machine
CONFIG = """
run: {{name: run, folder: {folder}, steps: {steps}, stop_timeout: 30, start_timeout: 180}}
model: {{path: {model}}}
task: {{name: copy}}
generate: {{group_size: 4, groups_in_flight: 8, probes: 1, sampling: {{max_new_tokens: 8}}}}
replay: {{groups_per_step: 4, max_staleness: 2}}
learner: {{optimizer: {{lr: 1.0e-3}}}}
journal: {{keep: all}}
publish: {{keep_every: 1}}
checkpoint: {{every: 4}}
"""


@dataclass
class Run:
    """One `streamrl train` process and its run folder."""

    folder: Path
    command: list[str]
    process: subprocess.Popen[str] | None = None
    descendants: set[psutil.Process] = field(default_factory=set)  # by id and start: an id is used again
    shared_memory: set[str] = field(default_factory=set)
    port: int = 0  # of the replay service, once it was seen

    def start(self, *overrides: str) -> "Run":
        self.shared_memory = nobodys()
        self.process = subprocess.Popen(
            [*self.command, *overrides], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return self

    def finish(self) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, output

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until `condition` holds; notes every descendant on the way."""
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "condition did not come true"
            self.note_descendants()
            time.sleep(0.1)
        self.note_descendants()

    def note_descendants(self) -> None:
        self.descendants |= set(psutil.Process(self.process.pid).children(recursive=True))
        if (self.folder / "replay.address").exists():
            self.port = int((self.folder / "replay.address").read_text().rpartition(":")[2])

    def steps(self) -> int:
        return len(list(read_metrics(self.folder))) if (self.folder / "metrics.jsonl").exists() else 0

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def assert_nothing_is_left(self, within: float = 40.0) -> None:
        """No descendant lives, no shared memory was added, nobody listens at the run's address."""
        assert self.descendants, "no descendant was seen"
        deadline = time.monotonic() + within
        while alive := [process for process in self.descendants if _alive(process)]:
            assert time.monotonic() < deadline, [process.cmdline() for process in alive if _alive(process)]
            time.sleep(0.1)
        assert_none_is_left(self.shared_memory)
        assert self.port
        assert self.port not in {c.laddr.port for c in psutil.net_connections() if c.status == psutil.CONN_LISTEN}


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([sys.executable, "-m", "streamrl.launch.tiny_model", str(folder)], check=True, timeout=DEADLINE)
    return folder


@pytest.fixture(scope="session")
def make_run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Run]]:
    """A run that is ready to start; what it leaves behind at the end of the tests is ended by its id."""
    runs: list[Run] = []

    def make(steps: int = STEPS) -> Run:
        folder = tmp_path_factory.mktemp("runs")
        file = folder / "config.yaml"
        file.write_text(CONFIG.format(folder=folder, steps=steps, model=tiny_model))
        runs.append(Run(folder / "run", [sys.executable, "-m", "streamrl.cli", "train", str(file)]))
        return runs[-1]

    yield make
    for run in runs:
        if run.process and run.process.poll() is None:
            run.process.kill()
    for process in {process for run in runs for process in run.descendants if _alive(process)}:
        process.kill()


@pytest.fixture(scope="session")
def finished_run(make_run: Callable[..., Run]) -> Run:
    """An asynchronous run that came to its end."""
    run = make_run().start()
    code, output = run.finish()
    assert code == 0, output
    return run


@pytest.fixture(scope="session")
def interrupted_run(make_run: Callable[..., Run]) -> Callable[..., Run]:
    """`interrupted_run(SIGINT, *overrides)`: a run whose supervisor got a signal in the middle, resumed to its end."""

    def make(number: signal.Signals, *overrides: str) -> Run:
        run = make_run(steps=INTERRUPTED_STEPS).start(*overrides)
        run.wait_for(lambda: run.steps() >= 3)
        run.process.send_signal(number)
        code, output = run.finish()
        assert code == (130 if number == signal.SIGINT else -number), output
        run.assert_nothing_is_left(within=60.0)
        assert 3 <= run.steps() < INTERRUPTED_STEPS
        code, output = run.start(*overrides).finish()
        assert code == 0, output
        return run

    return make


@pytest.fixture(scope="session")
def resumed_run(interrupted_run: Callable[..., Run]) -> Run:
    """A run whose supervisor was killed in the middle, resumed by the same command."""
    return interrupted_run(signal.SIGKILL)

"""Workers on one host, replay service and learner on another, and the link between them cut for a while.

The hosts are network namespaces (`tests/network.py`); the processes are those of `benchmarks/faults.py`: the real
service, and the real protocol of worker and learner without models. Nothing is configured for the two hosts but the
address, so that CURVE is on as it is by default.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.fault_roles import Trained, read_record
from benchmarks.faults import Process, Verdict, judge, make_config
from streamrl.config import Config
from streamrl.config import file as config_file
from tests.network import STRANGER, Network, network

PATIENCE = 150.0  # seconds for anything that must come; a connection that was cut is noticed within 40 (stream/sockets)
STEPS = 10  # learner steps before the cut, and after it

FRONT, BACK = "front", "back"


@pytest.fixture
def hosts() -> Iterator[Network]:
    with network(FRONT, BACK) as made:
        yield made


class Run:
    """Service and learner in front, two workers at the back."""

    def __init__(self, hosts: Network, folder: Path, lease: float) -> None:
        (folder / "logs").mkdir(parents=True)
        tree = make_config(folder, "fifo", "all").model_dump()
        tree["replay"] |= {"address": f"tcp://{hosts.addresses[FRONT]}:0", "lease": lease}
        self.config = Config.model_validate(tree)
        self.folder = folder
        self.hosts = hosts
        config_file.save(self.config, folder / "config.yaml")
        roles = [sys.executable, "-m", "benchmarks.fault_roles"]
        replay = [sys.executable, "-m", "streamrl.cli", "replay", "--run-folder", str(folder)]
        self.service = self._process("replay", FRONT, *replay, "--lifeline", str(os.getpid()))
        self.learner = self._process("learner", FRONT, *roles, "learner", str(folder))
        self.workers = [
            self._process(f"worker-{index}", BACK, *roles, "worker", str(folder), str(index)) for index in (0, 1)
        ]

    def start(self) -> None:
        for process in self._processes:
            process.start()

    def steps(self) -> int:
        return sum(isinstance(line, Trained) for line in read_record(self.folder))

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"see {self.folder}"
            for process in self._processes:
                assert process.process is not None
                assert process.process.poll() is None, f"{process.name} ended; see {process.log}"
            time.sleep(0.05)

    def end(self) -> Verdict:
        """What the record shows when the learner has written its last checkpoint."""
        assert self.learner.end(signal.SIGTERM) == 0, self.learner.log.read_text()
        return judge(self.folder, self.config, [], Verdict())

    def close(self) -> None:
        for process in self._processes:
            if process.process is not None and process.process.poll() is None:
                process.kill()

    @property
    def _processes(self) -> list[Process]:
        return [self.service, self.learner, *self.workers]

    def _process(self, name: str, host: str, *command: str) -> Process:
        return Process(name, self.hosts.at(host, *command), self.folder / "logs" / f"{name}.log")


@pytest.fixture
def make_run(hosts: Network, tmp_path: Path) -> Iterator[Callable[[float], Run]]:
    runs = []

    def make(lease: float) -> Run:
        runs.append(Run(hosts, tmp_path / "run", lease))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def _cut_and_restore(run: Run, seconds: float) -> None:
    run.start()
    run.wait(lambda: run.steps() >= STEPS)
    run.hosts.link(BACK, "down")
    time.sleep(seconds)
    stalled = run.steps()
    time.sleep(1.0)
    assert run.steps() == stalled  # the learner has nothing left to train
    run.hosts.link(BACK, "up")
    run.wait(lambda: run.steps() >= stalled + STEPS)
    verdict = run.end()
    assert verdict.holds, verdict
    assert verdict.placeholders == 0


@pytest.mark.slow
def test_a_cut_link_loses_nothing_and_repeats_nothing(make_run: Callable[[float], Run]) -> None:
    _cut_and_restore(make_run(1.0), seconds=4.0)  # every ticket is issued again meanwhile, to nobody


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lease", [10.0, 120.0])
def test_half_a_minute_without_a_link_loses_nothing_and_repeats_nothing(
    make_run: Callable[[float], Run], lease: float
) -> None:
    _cut_and_restore(make_run(lease), seconds=30.0)


@pytest.mark.slow
def test_a_peer_without_the_key_gets_nothing_from_another_host(
    hosts: Network, make_run: Callable[[float], Run]
) -> None:
    run = make_run(10.0)
    run.start()
    run.wait(lambda: run.steps() >= 1)
    address = (run.folder / "replay.address").read_text().strip()
    assert address.startswith(f"tcp://{hosts.addresses[FRONT]}:")
    for service_key in ("none", (run.folder / "keys" / "service.pub").read_text().strip()):
        stranger = hosts.at(BACK, sys.executable, "-c", STRANGER, address, service_key)
        done = subprocess.run(stranger, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
    assert "without this run's key was turned away" in run.service.log.read_text()
    assert run.end().holds

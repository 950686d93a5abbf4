"""A run on four hosts, each with processes, a network and a name of its own: one is cut off, another one dies.

The learner has a rank on each of the hosts one and two, the replay service is on one, a generator worker with its
SGLang server on each of three and four. Every line is the one that `launch.render` printed. The hosts are namespaces
of this machine (`tests/network.py`): root, iproute2 and util-linux are needed (`apt-get install iproute2 util-linux`).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import yaml

from launch import tiny_model
from launch.role import GOES_ON
from streamrl import cli
from streamrl.observe.events import event_path, read_events
from streamrl.observe.metrics import read_metrics
from streamrl.replay.history import recorded_batches
from tests.network import STRANGER, Network, network

REPOSITORY = Path(__file__).parents[2]

LEARNERS, GENERATORS = ("one", "two"), ("three", "four")

PORT = 7100  # of the replay service, the default

PATIENCE = 300.0  # seconds for anything that must come; two cores start two servers and two ranks for one minute

CUT = 60.0  # seconds; twice the lease of a ticket

LEARNED = 100  # steps of the quickstart, in which it learns its task

ENDLESS = 100_000  # steps; more than anyone waits for

# PORT: bytes to and from it that pass the switch in five seconds, and how often they name a worker, as each group does.
LISTENER = """
import socket, sys, time
cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
cable.settimeout(1)
received, end = bytearray(), time.monotonic() + 5
while time.monotonic() < end:
    try:
        packet = cable.recv(1 << 16)
    except TimeoutError:
        continue
    header = 14 + 4 * (packet[14] & 15)
    if packet[23] == 6 and int(sys.argv[1]) in (int.from_bytes(packet[header + at :][:2]) for at in (0, 2)):
        received += packet[header + 4 * (packet[header + 12] >> 4) :]
print(len(received), received.count(b"generator-"))
"""


class FourHosts:
    """One run, started as a person would: the printed line on each host."""

    def __init__(
        self,
        hosts: Network,
        folder: Path,
        *override: str,
        learners: Sequence[str] = LEARNERS,
        generators: Sequence[str] = GENERATORS,
    ) -> None:
        self.hosts = hosts
        self.run = folder / "runs" / "quickstart"
        self._output = folder / "launch"
        self._log = (folder / "hosts.log").open("wb")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        tiny_model.make(folder / "model")
        description = {
            "config": str(REPOSITORY / "configs/quickstart.yaml"),
            "override": [f"model.path={folder}/model", f"run.steps={ENDLESS}", *override],
            "folder": str(folder / "runs"),
            "learner": {"nodes": len(learners), "gpus": 0},
            "generators": {"nodes": len(generators), "gpus": 0},
            "hosts": [*learners, *generators],
            "python": sys.executable,
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(description))
        render = [sys.executable, "-m", "launch.render", "hosts", str(folder / "run.yaml"), "-o", str(self._output)]
        told = subprocess.run(render, cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=PATIENCE)
        lines = (line.split(": ", 1) for line in told.stdout.splitlines() if line.startswith("  on "))
        self._lines = {host.removeprefix("  on "): line for host, line in lines}

    def start(self, *hosts: str) -> None:
        for host in hosts:
            command = self.hosts.machine(host, "bash", "-c", self._lines[host])
            self._processes[host] = subprocess.Popen(
                command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
            )

    def signal_tree(self, host: str) -> None:
        """SIGTERM to what was started on a host."""
        first = psutil.Process(self._processes[host].pid).children()[0]
        first.send_signal(signal.SIGTERM)

    def tree(self, host: str) -> list[psutil.Process]:
        """Every process of a host."""
        return psutil.Process(self._processes[host].pid).children(recursive=True)

    def kill(self, host: str) -> None:
        """Every process of a host at once."""
        self._processes[host].kill()
        self._processes[host].wait(PATIENCE)

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"see {self.run / 'logs'}"
            ended = {host: process.poll() for host, process in self._processes.items()}
            assert all(code in (None, -signal.SIGKILL) for code in ended.values()), (ended, f"see {self.run / 'logs'}")
            time.sleep(0.5)

    def ended(self, host: str) -> int:
        """The exit code of a host that ends by itself."""
        return self._processes[host].wait(PATIENCE)

    def steps(self) -> int:
        return sum(1 for _ in read_metrics(self.run)) if (self.run / "metrics.jsonl").exists() else 0

    def groups_of(self, worker: int) -> int:
        """Groups of a worker that the replay service has taken until now."""
        events = read_events(event_path(self.run, "replay"))
        return sum(event["event"] == "group.accepted" and event["worker"] == f"generator-{worker}" for event in events)

    def close(self) -> None:
        for host in self._processes:
            self.kill(host)
        self._log.close()


@pytest.fixture
def four_hosts(tmp_path: Path) -> Iterator[FourHosts]:
    with network(*LEARNERS, *GENERATORS) as hosts:
        made = FourHosts(hosts, tmp_path, "learner.ranks=2", "generate.workers=2")
        try:
            yield made
        finally:
            made.close()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_on_four_hosts_learns_while_one_host_is_cut_off_and_another_one_dies(four_hosts, capsys):
    run = four_hosts
    run.start(*run.hosts.addresses)
    run.wait(lambda: run.steps() >= 3 and min(map(run.groups_of, (0, 1))) >= 8)
    _assert_a_stranger_is_refused(run)
    _assert_nothing_can_be_read_on_the_way(run)
    _cut_off(run, "three", worker=0)
    _lose(run, "four", worker=1)
    run.wait(lambda: run.steps() >= LEARNED)

    run.signal_tree("one")
    assert [run.ended(host) for host in run.hosts.addresses] == [GOES_ON] * 4
    rewards = [row["reward/mean"] for row in read_metrics(run.run)]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.4
    assert cli.main(["journal", str(run.run), "--verify"]) == 0
    assert "every record and every frame matches its checksum" in capsys.readouterr().out
    groups = [group for batch in recorded_batches(run.run / "journal") for group in batch.groups]
    assert [group.group_id for group in groups] == list(range(len(groups)))  # nothing lost, twice or reordered
    assert len(groups) - 32 * len(rewards) in (0, 32)  # a batch may be handed out when the run is ended
    assert not any(sample.is_placeholder for group in groups for sample in group.samples)
    assert {group.worker for group in groups} == {"generator-0", "generator-1"}
    assert cli.main(["audit", str(run.run)]) == 0, capsys.readouterr().out


def _assert_a_stranger_is_refused(run: FourHosts) -> None:
    """Another host that knows the address, and then the service's public key, but has no key of the run."""
    address = (run.run / "replay.address").read_text().strip()
    assert address == f"tcp://one:{PORT}"
    for key in ("none", (run.run / "keys" / "service.pub").read_text().strip()):
        stranger = run.hosts.machine("four", sys.executable, "-c", STRANGER, address, key)
        done = subprocess.run(stranger, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
    assert "without this run's key was turned away" in (run.run / "logs" / "replay-0.log").read_text()


def _assert_nothing_can_be_read_on_the_way(run: FourHosts) -> None:
    steps = run.steps()
    while True:
        listener = run.hosts.at_switch(sys.executable, "-c", LISTENER, str(PORT))
        output = subprocess.run(listener, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout
        size, named = map(int, output.split())
        assert named == 0
        if run.steps() > steps + 1:  # groups have passed by
            break
    assert size > 10_000


def _cut_off(run: FourHosts, host: str, worker: int) -> None:
    """A host without a network for a while: the others go on, and it comes back by itself."""
    run.hosts.link(host, "down")
    steps, end = run.steps(), time.monotonic() + CUT
    run.wait(lambda: time.monotonic() > end)
    assert run.steps() > steps + 3
    groups = run.groups_of(worker)
    run.hosts.link(host, "up")
    run.wait(lambda: run.groups_of(worker) >= groups + 8)


def _lose(run: FourHosts, host: str, worker: int) -> None:
    """A host dies without a word on the network; the others go on, and the same line brings it back."""
    run.hosts.link(host, "down")
    run.kill(host)
    steps = run.steps()
    run.wait(lambda: run.steps() >= steps + 10)
    groups = run.groups_of(worker)
    run.hosts.link(host, "up")
    run.start(host)
    run.wait(lambda: run.groups_of(worker) >= groups + 8)

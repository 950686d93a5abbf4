"""One server over two hosts: SGLang's ranks meet over a network, learn together, and are started again together.

Learner and replay service are on host one; the server's worker is on two, its further node on three. The hosts are
namespaces of this machine, as in `tests/launch/test_four_hosts.py`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch.role import DONE
from streamrl import cli
from streamrl.engine.nodes import has_joined
from streamrl.observe.events import event_path, read_events
from streamrl.replay.history import recorded_batches
from tests.launch.test_four_hosts import FourHosts
from tests.network import network

HOSTS = ("one", "two", "three")

STEPS = 40  # more than are trained until the last kill

TWO_NODES = ("generate.server_nodes=2", "generate.tensor_parallel=2", "run.start_timeout=200")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[FourHosts]:
    override = (*TWO_NODES, f"run.steps={STEPS}")
    with network(*HOSTS) as there:
        made = FourHosts(there, tmp_path, *override, learners=HOSTS[:1], generators=HOSTS[1:])
        try:
            yield made
        finally:
            made.close()


def events(run: FourHosts, name: str) -> list[str]:
    """The reasons, or servers, of the worker's events of a name."""
    path = event_path(run.run, "generator")
    found = [event for event in read_events(path) if event["event"] == name] if path.exists() else []
    return [event.get("reason", event.get("server", "")) for event in found]


def goes_on(run: FourHosts) -> None:
    steps, groups = run.steps(), run.groups_of(0)
    run.wait(lambda: run.steps() >= steps + 3 and run.groups_of(0) >= groups + 16)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_server_over_two_hosts_learns_and_is_whole_again_after_a_part_of_it_has_died(hosts, capsys):
    run = hosts
    run.start("one", "three")  # a further node may be there before its worker
    run.start("two")
    run.wait(lambda: run.steps() >= 3)
    assert has_joined(run.run, "server-0", 1, since=0.0)

    _kill_the_engine(run, "three")
    run.wait(lambda: len(events(run, "server.restarted")) == 1)
    assert len(events(run, "server.lost")) == 1  # as the other rank has said, or the node
    goes_on(run)

    run.hosts.link("three", "down")
    run.kill("three")
    run.hosts.link("three", "up")
    run.wait(lambda: len(events(run, "server.lost")) == 2)
    run.start("three")
    run.wait(lambda: len(events(run, "server.restarted")) == 2)
    goes_on(run)

    _kill_the_engine(run, "two")
    run.wait(lambda: len(events(run, "server.restarted")) == 3)
    goes_on(run)

    assert [run.ended(host) for host in HOSTS] == [DONE] * 3
    groups = [group for batch in recorded_batches(run.run / "journal") for group in batch.groups]
    assert [group.group_id for group in groups] == list(range(len(groups)))  # nothing lost, twice or reordered
    assert not any(sample.is_placeholder for group in groups for sample in group.samples)
    assert cli.main(["audit", str(run.run)]) == 0, capsys.readouterr().out


def _kill_the_engine(run: FourHosts, host: str) -> None:
    """SIGKILL to a scheduler of SGLang on a host."""
    engine = next(process for process in run.tree(host) if "streamrl.engine.launch" in " ".join(_command(process)))
    victim = next(iter(engine.children(recursive=True)), engine)
    victim.send_signal(signal.SIGKILL)


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        found: list[str] = process.cmdline()
        return found
    return []

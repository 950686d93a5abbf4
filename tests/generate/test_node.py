"""The role of a further node: it takes part in each start of its server, and ends as its worker has."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from streamrl import cli
from streamrl.engine.nodes import FurtherNodes, has_joined
from tests.shared_memory import assert_none_is_left, nobodys

DEADLINE = 100.0  # seconds for anything that must come

NODES = {"server_nodes": 2, "tensor_parallel": 2}

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def config(tmp_path: Path, model_folders: tuple[Path, Path]) -> Path:
    """Of a run whose roles give up after two seconds without a word, unless an override says otherwise."""
    tree = {
        "run": {"name": "run", "folder": str(tmp_path), "progress_timeout": 2.0},
        "model": {"path": str(model_folders[0])},
        "generate": {**NODES, "heartbeat": 0.1},
        "replay": {"group_timeout": 1.0, "lease": 1.0},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def start(config: Path) -> Iterator[Start]:
    """`start(*overrides)`: node 1 of the server of worker 0."""
    started: list[subprocess.Popen[str]] = []

    def start(*overrides: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "streamrl.cli", "generator", str(config), *overrides, "--node", "1"]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(condition: Callable[[], object], node: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert node.poll() is None, node.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_it_joins_its_server_and_ends_it_and_itself_as_its_worker_has(start: Start, tmp_path: Path) -> None:
    segments = nobodys()
    node, run = start(f"run.progress_timeout={DEADLINE}"), tmp_path / "run"
    nodes = FurtherNodes(run, "server-0", 2)
    until(run.exists, node)
    nodes.begin("127.0.0.1", 1, time.monotonic())
    until(lambda: has_joined(run, "server-0", 1, since=0.0), node)
    (engine,) = psutil.Process(node.pid).children()
    words = " ".join(engine.cmdline())
    assert "--nnodes 2 --node-rank 1 --dist-init-addr 127.0.0.1:1" in words
    nodes.begin("127.0.0.1", 2, time.monotonic())
    until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, node)
    until(lambda: [each for each in psutil.Process(node.pid).children() if each != engine], node)
    (again,) = (each for each in psutil.Process(node.pid).children() if each != engine)
    nodes.leave(3)
    assert node.wait(DEADLINE) == 3
    psutil.wait_procs([again], DEADLINE)
    assert not again.is_running()
    assert_none_is_left(segments)


def test_a_node_that_receives_nothing_from_its_worker_gives_up_with_one_line(start: Start) -> None:
    node = start()
    _, told = node.communicate(timeout=DEADLINE)
    assert node.returncode == 1
    assert told.splitlines()[-1] == "generator-0, node 1: the worker has reported nothing in 2 s"


@pytest.mark.parametrize(("node", "override"), [("2", ""), ("1", "generate.server_nodes=1")])
def test_a_node_that_the_server_does_not_have_is_refused(config: Path, capsys, node: str, override: str) -> None:
    assert cli.main(["generator", str(config), *filter(None, [override]), "--node", node]) == 2
    nodes = 1 if override else 2
    line = f"--node: {node} is none of a server with generate.server_nodes={nodes}; allowed: 0 to {nodes - 1}"
    assert line in capsys.readouterr().err

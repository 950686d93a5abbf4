"""The rendered torchrun lines of two nodes, with ranks that do nothing: they meet, meet again, and end when told."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch import role
from launch.description import load
from launch.render import Launch
from streamrl.config import file as config_file

HERE = socket.gethostname()
TIMEOUT = 100.0  # seconds; a busy machine takes half a minute for the imports

# Writes down who it is; SIGTERM makes it save.
RANK = """
import json, os, signal, sys, time
up = os.path.join(sys.argv[1], "up-" + os.environ["RANK"] + "-" + str(os.getpid()))
def end(*_):
    open(os.path.join(sys.argv[1], "saved-" + os.environ["RANK"]), "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
with open(up + ".partial", "w") as file:
    json.dump({"pid": os.getpid(), "world": os.environ["WORLD_SIZE"], "arguments": sys.argv[2:]}, file)
os.rename(up + ".partial", up)
time.sleep(200)
"""


@pytest.mark.slow
def test_the_ranks_of_two_nodes_meet_again_after_a_kill_and_save_when_they_are_told(describe, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    commands = _commands(describe, tmp_path, script)
    agents = [subprocess.Popen(command) for command in commands]
    try:
        first = _ranks(tmp_path)
        assert [rank["world"] for rank in first] == ["2", "2"]
        assert all(rank["arguments"][:1] == ["--lifeline"] for rank in first)
        os.kill(first[0]["pid"], signal.SIGKILL)
        again = _ranks(tmp_path, former=[rank["pid"] for rank in first])
        assert [rank["world"] for rank in again] == ["2", "2"]
        (tmp_path / "saved-1").unlink()  # by the rank that torchrun ended so that both could start again
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        assert [agent.wait(TIMEOUT) for agent in agents] == [role.GOES_ON, role.GOES_ON]
        assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGTERM)
        for agent in agents:  # together: each waits for the other
            agent.wait(TIMEOUT)


def _commands(describe, tmp_path: Path, script: Path) -> list[list[str]]:
    """The learner's lines of both hosts, both of them this machine, with `script` in the learner's place."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    path = describe(
        config={"model": {"path": "/m"}, "run": {"name": "trial"}, "learner": {"ranks": 2}},
        folder=str(tmp_path / "runs"),
        learner={"nodes": 2, "gpus": 0},
        hosts=[HERE, HERE],
        python=sys.executable,
        rendezvous_port=port,
    )
    made = Launch("hosts", *load(path), tmp_path)
    made.config.run_folder.mkdir(parents=True)
    config_file.save(made.config, made.config.run_folder / "config.yaml")
    lines = re.findall(r"start learner-\d (.*)", made.files()["start.sh"])
    ours = f"-m streamrl.cli learner --run-folder {made.config.run_folder}"
    assert all(line.endswith(ours) for line in lines)
    return [shlex.split(line.removesuffix(ours) + f"{script} {tmp_path}") for line in lines]


def _ranks(folder: Path, former: list[int] | None = None) -> list[dict[str, Any]]:
    """What both ranks have written down, waited for; none of them is one of the `former` processes."""
    deadline = time.monotonic() + TIMEOUT
    told: dict[int, dict[str, Any]] = {}
    while len(told) < 2:
        assert time.monotonic() < deadline, f"only {told} came"
        time.sleep(0.1)
        for rank in (0, 1):
            for path in folder.glob(f"up-{rank}-*[0-9]"):
                if int(path.name.rpartition("-")[2]) not in (former or []):
                    told[rank] = json.loads(path.read_text())
    return [told[0], told[1]]

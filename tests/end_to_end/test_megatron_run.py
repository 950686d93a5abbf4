"""Agents of every kind of Megatron-RL train a tiny model in one run, from one task file, and the audit holds."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from streamrl import cli
from streamrl.evaluate.files import read_questions
from streamrl.observe.metrics import read_metrics
from streamrl.replay.journal import recorded_batches
from tests.own_choices import write_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]

STEPS = 10
LONGEST = 560.0  # seconds of the run
START = 120.0  # seconds of the server's
AGENTS = Path("tests/tasks/megatron_agents.py").resolve()
KINDS = ("Spelled", "Twice", "Prepared", "Asking", "Tokens", "Shorter", "Duel")
SAMPLES = 4


@pytest.fixture
def environment_server(tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of an agent in a process of its own."""
    file = tmp_path / "served.yaml"
    file.write_text(json.dumps([{"agent_type": f"{AGENTS}:Twice", "agent_args": {}, "weight": 1.0}]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "streamrl.tasks.megatron_rl.environment_server", "--env-config", str(file)]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(START)


def test_agents_of_every_kind_train_and_every_promise_holds(make_run, environment_server, tmp_path, capsys):
    entries = [{"agent_type": f"{AGENTS}:{kind}", "agent_args": {}, "weight": 1.0} for kind in KINDS]
    write_files(tmp_path)
    entries.append({"agent_type": f"{tmp_path}/vowels.py:Vowels", "agent_args": {}})  # of the page
    entries.append({"agent_type": "RemoteAgent", "agent_args": {"env_server_host_port": environment_server}})
    exam = {"agent_type": f"{AGENTS}:Exam", "agent_args": {"evaluation_prompts": 2}, "evaluation_only": True}
    file = tmp_path / "tasks.yaml"
    file.write_text(json.dumps([*entries, exam]))
    run = make_run(steps=STEPS)
    words = (
        f"task.file={file}",
        f"generate.group_size={SAMPLES}",
        "replay.groups_per_step=9",
        "task.scoring.processes=1",
    )
    evaluated = ("evaluate.every=10", "evaluate.prompts=2", "evaluate.samples=2", "task.scoring.timeout=120")
    process = run.start(*words, *evaluated).process
    output, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, output
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert any(row["grad_norm"] > 0 for row in rows)
    capsys.readouterr()
    assert cli.main(["audit", str(run.folder)]) == 0
    assert "every checked promise held" in capsys.readouterr().out
    answered, masked = Counter[str](), Counter[str]()
    for batch in recorded_batches(run.folder / "journal"):
        for group in batch.groups:
            for sample in group.answered:
                answered[group.task] += 1
                masked[group.task] += int((~sample.loss_mask).sum())
                assert not np.asarray(sample.logprobs)[~sample.loss_mask].any()
    assert answered == dict.fromkeys((*KINDS, "Vowels", "RemoteAgent"), STEPS * SAMPLES)
    assert {task for task, tokens in masked.items() if tokens} == {"Twice", "RemoteAgent"}
    folder = max((run.folder / "evaluations").iterdir())
    assert all(question.answers for question in read_questions(folder, "Exam"))

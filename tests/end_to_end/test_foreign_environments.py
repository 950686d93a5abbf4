"""One environment of each adapted library trains a tiny model, and the audit finds every promise kept."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import yaml

from streamrl import cli
from streamrl.observe.metrics import read_metrics
from streamrl.replay.journal import recorded_batches
from tests.documented_commands import ROOT, blocks, commands
from tests.foreign_environments import python_of
from tests.harbor_tasks import write_task
from tests.tasks.test_foreign import LETTERS, RECALL, openenv_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]

STEPS = 10
LONGEST = 560.0  # seconds of a run
LOAD_TIMEOUT = 200.0  # seconds
PAGE = ROOT / "docs" / "environments.md"


def train(
    run: Any,
    name: str,
    args: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    *overrides: str,
    turns: bool = True,
) -> set[str]:
    """Train, and audit. Returns the names of the reward parts. `turns`: an answer has several of them."""
    words = (f"task.name={name}", f"task.args={json.dumps(args)}", "generate.group_size=8", *overrides)
    process = run.start(*words).process
    output, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, output
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert any(row["grad_norm"] > 0 for row in rows)
    capsys.readouterr()
    assert cli.main(["audit", str(run.folder)]) == 0
    assert "every checked promise held" in capsys.readouterr().out
    parts, masked = set[str](), 0
    for batch in recorded_batches(run.folder / "journal"):
        for sample in (sample for group in batch.groups for sample in group.answered):
            parts |= set(sample.reward_parts)
            masked += int((~sample.loss_mask).sum())
            assert not np.asarray(sample.logprobs)[~sample.loss_mask].any()
    assert masked > 0 or not turns
    return parts


@pytest.mark.parametrize("library", ["verifiers", "gymnasium"])
def test_what_the_page_shows_trains_with_the_arguments_that_it_shows(make_run, capsys, tmp_path, library):
    (block,) = [text for kind, text in blocks(PAGE) if kind == "python" and f"import {library}" in text]
    name = block.splitlines()[0].removeprefix("# ")
    (command,) = [each for each in commands(PAGE) if f"task.name={library}" in each.words]
    (given,) = [word.removeprefix("task.args=") for word in command.words if word.startswith("task.args=")]
    args = yaml.safe_load(given)
    assert args["environment"].startswith(f"{name}:")
    (tmp_path / name).write_text(block)
    args |= {"python": str(python_of(library)), "environment": f"{tmp_path}/{args['environment']}"}
    part = "repeated" if library == "verifiers" else "found"
    parts = train(make_run(steps=STEPS), library, {**args, "start_timeout": LOAD_TIMEOUT}, capsys, turns=False)
    assert part in parts


def test_an_environment_of_verifiers_trains_and_every_promise_holds(make_run, capsys):
    args = {
        "python": str(python_of("verifiers")),
        "environment": LETTERS,
        "options": {"kind": "twice"},
        "start_timeout": LOAD_TIMEOUT,
    }
    parts = train(make_run(steps=STEPS), "verifiers", args, capsys)
    assert {"repeated", "repeated_again", "num_turns"} <= parts


def test_an_environment_of_gymnasium_trains_and_every_promise_holds(make_run, capsys):
    args = {"python": str(python_of("gymnasium")), "environment": RECALL, "start_timeout": LOAD_TIMEOUT}
    assert {"last", "turns"} <= train(make_run(steps=STEPS), "gymnasium", args, capsys)


def test_an_openenv_server_trains_and_every_promise_holds(make_run, capsys):
    with openenv_server("32") as url:
        assert "turns" in train(make_run(steps=STEPS), "openenv", {"url": url, "parallel": 16}, capsys)


def test_harbor_tasks_train_and_every_promise_holds(make_run, tmp_path, capsys):
    for word in ("ab", "cd", "ef", "gh", "ac", "bd", "eg", "fh"):
        write_task(tmp_path / word, word)
    args = {"path": str(tmp_path), "commands": False, "answer": "answer.txt", "held_out": 0.2}
    assert {"right", "turns"} <= train(make_run(steps=STEPS), "harbor", args, capsys, turns=False)


def test_a_task_that_needs_docker_is_refused_before_the_run_starts(make_run, tmp_path):
    write_task(tmp_path / "ab", "ab", dockerfile="FROM ubuntu\nRUN make\n")
    run = make_run(steps=STEPS)
    code, output = run.start("task.name=harbor", f"task.args={json.dumps({'path': str(tmp_path)})}").finish()
    assert code == 2
    (line,) = [line for line in output.splitlines() if "docker" in line]
    assert "task.args.path: ab: environment/Dockerfile: RUN make needs docker; allowed: " in line

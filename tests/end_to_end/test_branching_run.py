"""Rollouts of several branches through the whole loop: the agent and the task that the pages show."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import pytest

from streamrl import cli
from streamrl.observe.metrics import read_metrics
from streamrl.replay.journal import recorded_batches
from streamrl.types import Group
from tests.documented_commands import ROOT, blocks
from tests.own_choices import write_files

STEPS = 10
GROUP_SIZE = 4
SMALL = ("run.steps=3", "generate.group_size=2", "generate.groups_in_flight=4", "replay.groups_per_step=2")
DEADLINE = 500.0  # seconds; a start of SGLang on two busy cores may take a hundred


def recorded(folder) -> list[Group]:
    """The groups that were trained."""
    return [group for batch in recorded_batches(folder / "journal") for group in batch.groups]


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE + 300)
def test_an_agent_that_branches_is_trained_audited_and_retrained_bit_for_bit(make_run, tmp_path, capsys):
    write_files(tmp_path)
    run = make_run(steps=STEPS)
    task = "{task: {name: copy, args: {length: 2}}, function: %s:agent}" % (tmp_path / "summing_agent.py")
    overrides = ("task.name=agent", f"task.args={task}", "algo.aggregation=sequence_mean")
    process = run.start(*overrides).process
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, output
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["samples/branches"] for row in rows] == [2.0] * STEPS
    assert [(row["samples/all"], row["samples/failed"]) for row in rows] == [(4 * GROUP_SIZE, 0)] * STEPS
    assert sum(row["reward/mean"] for row in rows) > 0
    assert any(row["grad_norm"] > 0 for row in rows)
    groups = recorded(run.folder)
    assert {group.branches for group in groups} == {(2,) * GROUP_SIZE}
    for solved, answered in (rollout for group in groups for rollout in group.rollouts):
        assert solved.reward == answered.reward
        assert not solved.loss_mask.all()  # what the agent said between the two answers
        assert answered.loss_mask.all()
    assert cli.main(["audit", str(run.folder)]) == 0
    assert "tokens audited" in capsys.readouterr().out
    assert cli.main(["retrain", str(run.folder), "--output", str(tmp_path / "again")]) == 0
    assert f"equal to the run's weights of step {STEPS}: bit for bit" in capsys.readouterr().out
    assert cli.main(["report", str(run.folder)]) == 0


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE + 100)
def test_the_task_of_the_page_trains_both_branches_of_a_rollout(tmp_path, monkeypatch, tiny_model):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny").symlink_to(tiny_model)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    (line,) = [text for kind, text in blocks(ROOT / "docs" / "tasks.md") if kind == "bash" and "summed_up" in text]
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli", *shlex.split(line)[1:], *SMALL],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    groups = recorded(tmp_path / "runs" / "summed_up")
    assert len(groups) == 3 * 2
    for group in groups:
        assert group.branches == (2, 2)
        assert len({sample.prompt_ids.tobytes() for noted, _ in group.rollouts for sample in [noted]}) == 1

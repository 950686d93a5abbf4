"""A two-turn task with a tool, trained by the whole loop: the reward climbs, and no token of the tool is trained."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl import cli
from streamrl.config import file as config_file
from streamrl.generate.tokenizer import Tokenizer
from streamrl.observe.metrics import read_metrics
from streamrl.replay.journal import recorded_batches
from streamrl.tasks.registry import build_task

STEPS = 30
LONGEST = 900.0  # seconds; the run takes an eighth of them on two quiet cores
OVERRIDES = (
    "task.name=lookup",
    "task.args={length: 2}",
    "generate.group_size=16",
    "generate.groups_in_flight=64",
    "replay.groups_per_step=32",
    "learner.optimizer={lr: 2.0e-3, warmup_steps: 10}",
)


@pytest.mark.slow
@pytest.mark.timeout(LONGEST + 300)
def test_a_two_turn_tool_task_climbs_and_no_trained_token_came_from_the_tool(make_run, capsys):
    run = make_run(steps=STEPS)
    process = run.start(*OVERRIDES).process
    output, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, output
    rewards = [row["reward/mean"] for row in read_metrics(run.folder)]
    assert np.mean(rewards[-5:]) > 2 * np.mean(rewards[:5])
    assert cli.main(["audit", str(run.folder)]) == 0
    capsys.readouterr()
    called = 0
    config = config_file.load(run.folder / "config.yaml")
    task, tokenizer = build_task(config.task, config.run.seed, "train"), Tokenizer(config.model.path)
    for batch in recorded_batches(run.folder / "journal"):
        for group in batch.groups:
            told = tokenizer.plain_ids(f"{task.prompt(group.prompt_index).answer}=").tolist()
            for sample in group.answered:
                untrained = sample.output_ids[~sample.loss_mask].tolist()
                assert untrained in ([], told)
                assert not sample.logprobs[~sample.loss_mask].any()
                called += bool(untrained)
    assert called > 0

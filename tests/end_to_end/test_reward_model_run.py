"""A run with the rewards of a task and of two reward models: one is killed in the middle, the other is stopped."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from launch import tiny_reward_model
from streamrl import cli
from streamrl.config import file as config_file
from streamrl.config.reward_model import RewardModelConfig
from streamrl.generate.tokenizer import Tokenizer
from streamrl.observe.events import read_events
from streamrl.observe.metrics import read_metrics
from streamrl.replay.journal import recorded_batches
from streamrl.reward_model.classifier import Classifier
from streamrl.reward_model.wire import Ask
from streamrl.tasks.registry import build_task

STEPS = 12
LONGEST = 1200.0  # seconds; a quiet machine takes a tenth of them
STOPPED = 4.0  # seconds for which the other one says nothing beside the successor of the first


def starts_of(run_folder: Path, index: int) -> list[dict]:
    path = run_folder / "events" / f"reward-model-{index}.jsonl"
    return [event for event in read_events(path) if event["event"] == "process.start"] if path.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(LONGEST + 300)
def test_a_run_survives_the_death_and_the_silence_of_its_reward_models(make_run, tmp_path, capsys):
    tiny_reward_model.make(tmp_path / "reward")
    run = make_run(steps=STEPS)
    rewards = [{"name": "of_task"}, {"name": "reward_model", "weight": 0.25}]
    served = {"path": str(tmp_path / "reward"), "workers": 2, "timeout": 3.0, "patience": 300.0, "retry": 0.2}
    keys = (f"task.rewards={json.dumps(rewards)}", f"reward_model={json.dumps(served)}", "run.start_timeout=900")
    process = run.start(*keys).process
    deadline = time.monotonic() + LONGEST
    while run.steps() < 3:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        run.note_descendants()
        time.sleep(0.2)
    first, second = (starts_of(run.folder, index)[-1]["pid"] for index in range(2))
    os.kill(first, signal.SIGKILL)
    os.kill(second, signal.SIGSTOP)
    while len(starts_of(run.folder, 0)) < 2:  # until then nobody scores
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        run.note_descendants()
        time.sleep(0.2)
    time.sleep(STOPPED)
    os.kill(second, signal.SIGCONT)
    output, _ = process.communicate(timeout=LONGEST)
    assert process.returncode == 0, output
    run.assert_nothing_is_left()
    assert len(starts_of(run.folder, 0)) == 2
    assert cli.main(["audit", str(run.folder)]) == 0
    capsys.readouterr()
    rows = list(read_metrics(run.folder))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert not any(row.get("samples/failed") for row in rows)
    assert all(row["reward/part/rewards.reward_model"] for row in rows)
    config = config_file.load(run.folder / "config.yaml")
    task, tokenizer = build_task(config.task, config.run.seed, "train"), Tokenizer(config.model.path)
    judge = Classifier(RewardModelConfig(path=tmp_path / "reward"))
    for batch in recorded_batches(run.folder / "journal"):
        for group in batch.groups:
            assert len(group.answered) == len(group.samples)
            answers = tokenizer.text([sample.output_ids.tolist() for sample in group.samples])
            ids = judge.ids(Ask(answers=answers, text=task.prompt(group.prompt_index).text))
            parts = [sample.reward_parts for sample in group.samples]
            scores = [each["rewards.reward_model"] for each in parts]
            assert scores == pytest.approx([judge.scores([each])[0] for each in ids], abs=1e-5)
            sums = [each["rewards.of_task"] + 0.25 * score for each, score in zip(parts, scores, strict=True)]
            assert [sample.reward for sample in group.samples] == pytest.approx(sums, abs=1e-5)
            assert np.isfinite(sums).all()

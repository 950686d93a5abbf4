"""The comparison with TRL: what it counts, that both sides are asked the same, and that both sides run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import peers, peers_trl
from benchmarks.peers import LEAST, OVER, TARGET, WARM_UP, Run, Step, _run, configuration, ratios
from benchmarks.peers_trl import is_over, steps_to_reward
from launch import tiny_model
from streamrl.tasks.registry import build_task


def _steps(count: int, *, seconds: float = 2.0, gain: float = 0.1) -> list[Step]:
    """Steps that all take as long, from the time 10 on, whose reward grows from 0."""
    return [Step(10 + seconds * (step + 1), 100, gain * step, 0.5) for step in range(count)]


def test_tokens_per_second_leave_out_the_warm_up_and_the_steps_without_generation():
    slow, fast = _steps(8, gain=0.0), _steps(3, seconds=0.01, gain=0.0)
    steps = [*slow, *(Step(slow[-1].time + each.time - 10, each.tokens, each.reward, 0.0) for each in fast)]
    run = Run.of(began=3.0, steps=steps, samples=10, counted=8)
    assert run.tokens_per_s == pytest.approx(50)
    assert run.waiting == pytest.approx(0.25)
    assert run.length == pytest.approx(10)
    assert run.first_step == pytest.approx(9)
    assert len(slow[WARM_UP:]) > 0


def test_the_reward_is_reached_when_the_mean_of_some_steps_is_and_nothing_counts_behind_it():
    steps = _steps(12, gain=0.1)  # the mean of 0.2 .. 0.6, the steps 2 to 6, is 0.4
    rewards = [step.reward for step in steps]
    assert (pytest.approx(0.4), OVER) == (TARGET, 5)
    assert steps_to_reward(rewards, TARGET, OVER) == 7
    assert steps_to_reward(rewards[:6], TARGET, OVER) is None
    assert steps_to_reward(rewards[:3], TARGET, OVER) is None
    fast = [Step(steps[-1].time + 0.01 * (each + 1), 100, 1.0, 0.0) for each in range(20)]
    run = Run.of(began=3.0, steps=[*steps[:LEAST], *fast], samples=10, counted=30)
    assert (run.steps_to_reward, run.to_reward) == (7, pytest.approx(10 + 2 * 7 - 3))
    assert run.tokens_per_s == pytest.approx(50)


def test_a_run_is_over_at_the_reward_and_never_before_its_least_steps():
    assert not is_over([1.0] * 6, target=0.4, over=5, least=7)
    assert is_over([1.0] * 7, target=0.4, over=5, least=7)
    assert not is_over([0.3] * 20, target=0.4, over=5, least=7)


SLEEPER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_a_run_is_ended_by_a_signal_where_it_is_enough(tmp_path):
    started = tmp_path / "started"
    _run([sys.executable, "-c", SLEEPER, str(started)], tmp_path / "log", started.exists)


@pytest.mark.parametrize("code", [1, 130])
def test_a_run_that_fails_by_itself_ends_the_benchmark(tmp_path, code):
    with pytest.raises(SystemExit, match=f"(?s)why.*ended with {code}"):
        _run([sys.executable, "-c", f"import sys; print('why'); sys.exit({code})"], tmp_path / "log")


def test_a_ratio_of_seconds_needs_both_sides_at_the_reward():
    reached = Run(60.0, 50.0, 7, 9.0, 0.1, 5.0)
    not_yet = Run(30.0, None, None, 9.0, 0.1, 5.0)
    assert ratios([{"streamrl": reached, "trl": not_yet}]) == {"tokens/s of TRL": [2.0]}
    both = ratios([{"streamrl": reached, "trl": Run(30.0, 100.0, 9, 9.0, 0.1, 5.0)}])
    assert both == {"tokens/s of TRL": [2.0], "times sooner at the reward": [2.0]}


def test_the_other_side_has_the_same_settings_and_the_same_reward(tmp_path):
    config = configuration(tmp_path, tmp_path / "model", "run", seed=3, steps=7)
    job = peers.job(config, tmp_path)
    assert (job.steps, job.seed, job.lr, job.eps_high) == (7, 3, config.learner.optimizer.lr, config.algo.eps_high)
    assert (job.group_size, job.groups_per_step) == (config.generate.group_size, config.replay.groups_per_step)
    task = build_task(config.task, 3, split="train")
    answer = task.prompt(0).answer
    assert answer is not None
    said = [[{"role": "assistant", "content": text}] for text in (f"It is {answer}.", answer + "1", "")]
    assert peers_trl.right(completions=said, answer=[answer] * 3) == [1.0, 0.0, 0.0]


def test_what_training_reads_counts_a_prompt_once_a_group_or_once_an_answer(tmp_path):
    config = configuration(tmp_path, tmp_path / "model", "run", seed=3, steps=7)
    groups, size = config.replay.groups_per_step, config.generate.group_size
    run = Run(60.0, 50.0, 7, 9.0, 0.1, 5.0)
    told = peers.reading(20.0, [{"streamrl": run, "trl": run}], config)
    assert f"reads {20 * groups + 5 * groups * size} tokens" in told
    assert f"TRL's {25 * groups * size}," in told


def test_a_model_that_is_not_there_is_told_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["peers", "--model", str(tmp_path / "none")])
    assert peers.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--model: ")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_sides_train_a_tiny_model_with_chat_messages(tmp_path):
    model = tmp_path / "model"
    tiny_model.make(model)
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--model", str(model), "--python", sys.executable]
    done = subprocess.run(
        [*command, "--json", str(figures)], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (repeat,) = json.loads(figures.read_text())["repeats"]
    assert {name: run["tokens_per_s"] > 0 for name, run in repeat.items()} == {"streamrl": True, "trl": True}

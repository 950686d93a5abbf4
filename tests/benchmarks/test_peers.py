"""The comparison with TRL: what it counts, that both sides are asked the same, and that both sides run."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from benchmarks import peers, peers_trl
from benchmarks.censored import Interval, at_least, exact, median, over, told
from benchmarks.peers import WARM_UP, Run, ratios
from benchmarks.peers_runs import (
    EXPLAINED,
    LEAST,
    OVER,
    ROOT,
    SHAPES,
    TARGET,
    Shape,
    Step,
    configuration,
    job,
    run_command,
)
from benchmarks.peers_trl import is_over, steps_to_reward
from launch import tiny_model
from streamrl.tasks.registry import build_task


def _steps(count: int, *, seconds: float = 2.0, gain: float = 0.1) -> list[Step]:
    """Steps that all take as long, from the time 10 on, whose reward grows from 0."""
    return [Step(10 + seconds * (step + 1), 100, gain * step, 0.5) for step in range(count)]


def test_tokens_per_second_leave_out_the_warm_up_and_the_steps_without_generation():
    slow, fast = _steps(8, gain=0.0), _steps(3, seconds=0.01, gain=0.0)
    steps = [*slow, *(Step(slow[-1].time + each.time - 10, each.tokens, each.reward, 0.0) for each in fast)]
    run = Run.of(began=3.0, steps=steps, samples=10, counted=8, target=TARGET)
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
    run = Run.of(began=3.0, steps=[*steps[:LEAST], *fast], samples=10, counted=30, target=TARGET)
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
    run_command([sys.executable, "-c", SLEEPER, str(started)], tmp_path / "log", started.exists)


@pytest.mark.parametrize("code", [1, 130])
def test_a_run_that_fails_by_itself_ends_the_benchmark(tmp_path, code):
    with pytest.raises(SystemExit, match=f"(?s)why.*ended with {code}"):
        run_command([sys.executable, "-c", f"import sys; print('why'); sys.exit({code})"], tmp_path / "log")


ASLEEP = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
BENCH = """
import sys
from pathlib import Path
from benchmarks.peers_runs import run_command
run_command([sys.executable, "-c", sys.argv[1], sys.argv[2]], Path(sys.argv[3]))
"""


def test_a_benchmark_that_is_told_to_end_leaves_no_run_behind(tmp_path):
    told = tmp_path / "pid"
    command = [sys.executable, "-c", BENCH, ASLEEP, str(told), str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT) as bench:
        while not (told.exists() and told.read_text()):
            assert bench.poll() is None
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(30.0) != 0
    assert not psutil.pid_exists(int(told.read_text()))


def test_a_benchmark_that_is_told_to_end_while_its_run_begins_leaves_none_behind(tmp_path, monkeypatch):
    begun = []

    class Interrupted(subprocess.Popen):
        """The signal comes when the run is there, and its caller does not have it yet."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            begun.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(SystemExit):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log")
    (run,) = begun
    assert run.poll() is not None


def run_of(speed: float, to_reward: float | None, ended: float = 80.0) -> Run:
    return Run(speed, to_reward, None if to_reward is None else 7, 9.0, 0.1, 5.0, ended)


def test_a_run_that_ends_before_the_reward_counts_as_more_than_its_seconds():
    run = Run.of(began=3.0, steps=_steps(12, gain=0.0), samples=10, counted=10, target=TARGET)
    assert (run.to_reward, run.reward_time) == (None, at_least(10 + 2 * 12 - 3))
    assert run_of(60.0, 50.0).reward_time == exact(50.0)


def test_a_ratio_of_seconds_leaves_no_repeat_out():
    repeats = [
        {"streamrl, x": run_of(60.0, 50.0), "TRL, x": run_of(30.0, 100.0)},
        {"streamrl, x": run_of(60.0, 50.0), "TRL, x": run_of(30.0, None)},  # 80 s at least: 1.6 times and more
        {"streamrl, x": run_of(60.0, None), "TRL, x": run_of(30.0, 100.0)},  # 1.25 times at most
        {"streamrl, x": run_of(60.0, None), "TRL, x": run_of(30.0, None)},
    ]
    found = ratios(repeats)
    assert found["x: tokens/s of TRL"] == [exact(2.0)] * 4
    sooner = "x: times sooner at the reward"
    assert found[sooner] == [exact(2.0), at_least(1.6), Interval(0, 1.25), at_least(0)]
    assert sooner not in ratios(repeats[3:])
    stated = peers.figures(repeats[:3], SHAPES["short"])["ratios"][1]
    assert (stated["median"], stated["low"], stated["high"]) == (1.6, 0, 2.0)


def test_each_is_compared_in_the_dtype_in_which_it_does_best_too():
    repeats = [
        {
            "streamrl, x": run_of(60.0, None),  # faster, and later
            "streamrl, y": run_of(40.0, 50.0),
            "TRL, x": run_of(10.0, 300.0),
            "TRL, y": run_of(20.0, 200.0),
        },
    ] * 2
    assert {name: values[0] for name, values in ratios(repeats).items()} == {
        "x: tokens/s of TRL": exact(6.0),
        "x: times sooner at the reward": Interval(0, 300.0 / 80.0),
        "y: tokens/s of TRL": exact(2.0),
        "y: times sooner at the reward": exact(4.0),
        "each in its faster dtype: tokens/s of TRL": exact(3.0),
        "each in its sooner dtype: times sooner at the reward": exact(4.0),
    }


def test_the_median_of_values_that_are_known_on_one_side_is_between_the_medians_of_their_ends():
    values = [exact(160.0), exact(171.0), at_least(230.0)]
    assert median(values) == exact(171.0)
    assert median([exact(160.0), at_least(200.0), at_least(230.0)]) == at_least(200.0)
    assert over(exact(6.0), exact(3.0)) == exact(2.0)
    assert told(values, ".0f") == "171 (160 .. >230)"
    assert told([Interval(0, 1.25), at_least(1.6), exact(2.0)]) == "1.60-2.00 (<1.25 .. >1.60)"
    assert told([at_least(0)]) == "? (? .. ?)"


def test_the_table_says_how_many_ended_before_the_reward_and_which_cpu_it_was(capsys):
    repeats = [{"streamrl, x": run_of(60.0, None), "TRL, x": run_of(30.0, 100.0)}] * 3
    peers.show(Console(width=peers.WIDTH), repeats, SHAPES["short"])
    out = capsys.readouterr().out
    assert "streamrl, x: 3 of 3 ended before the reward, and count as more than they had" in out
    assert "TRL, x: " not in out
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    assert peers.machine().startswith(names[0] if names else platform.machine())
    peers.show(Console(width=peers.WIDTH), repeats, SHAPES["long"])
    assert "reward" not in capsys.readouterr().out.partition("tokens/s of TRL")[0]


def test_each_side_has_the_dtype_of_its_name(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        peers,
        "run_streamrl",
        lambda config, target: asked.append(("streamrl", config.model.dtype, config.run.seed)) or _steps(12),
    )
    monkeypatch.setattr(
        peers,
        "run_trl",
        lambda config, python, target, bf16: asked.append(("TRL", bf16, config.run.seed)) or _steps(12),
    )
    bench = peers.Bench(tmp_path, tmp_path / "model", Path(sys.executable), SHAPES["short"])
    for seed, run in enumerate(bench.sides(("bfloat16", "float32")).values()):
        assert run(seed).to_reward is not None
    assert asked == [("streamrl", "bfloat16", 0), ("streamrl", "float32", 1), ("TRL", True, 2), ("TRL", False, 3)]


def test_the_sides_run_in_turn_and_each_is_first_once(tmp_path):
    bench = peers.Bench(tmp_path, tmp_path / "model", Path(sys.executable), SHAPES["short"])
    assert list(bench.sides(("float32", "float32"))) == ["streamrl, float32", "TRL, float32"]
    names = list(bench.sides(("bfloat16", "float32")))
    assert names == ["streamrl, bfloat16", "streamrl, float32", "TRL, bfloat16", "TRL, float32"]
    order = []

    def side(name):
        return lambda seed: order.append((seed, name)) or run_of(60.0, None)

    repeats = bench.measure({name: side(name) for name in names}, 4)
    assert [list(each) for each in repeats] == [names] * 4
    assert [name for _, name in order[::4]] == names
    assert sorted(order) == sorted((seed, name) for seed in (1, 2, 3, 4) for name in names)


def test_whole_repeats_of_the_same_shape_are_not_measured_again(tmp_path):
    bench = peers.Bench(tmp_path, tmp_path / "model", Path(sys.executable), SHAPES["short"])
    order = []

    def side(seed):
        order.append(seed)
        if len(order) == 2:
            raise SystemExit("ended in the second repeat")
        return run_of(60.0 + seed, None)

    with pytest.raises(SystemExit):
        bench.measure({"streamrl, x": side}, 3)
    with (tmp_path / "repeats.jsonl").open("a") as file:
        file.write('{"seed": 2, "ru')  # a write that was interrupted
    assert [each["streamrl, x"] for each in bench.measure({"streamrl, x": side}, 3)] == [
        run_of(60.0 + seed, None) for seed in (1, 2, 3)
    ]
    assert order == [1, 2, 2, 3]
    for other in (replace(bench, shape=SHAPES["long"]), replace(bench, model=tmp_path / "another")):
        order.clear()
        other.measure({"streamrl, x": lambda seed: order.append(seed) or run_of(1.0, None)}, 1)
        assert order == [1]


def test_long_answers_are_of_the_same_run_with_less_of_everything_else(tmp_path):
    short, long = (configuration(tmp_path, tmp_path / "model", "run", 1, SHAPES[name]) for name in ("short", "long"))
    assert long.generate.sampling.max_new_tokens > 10 * short.generate.sampling.max_new_tokens
    assert long.task.args["suffix"] == EXPLAINED
    assert {**long.task.args, "suffix": ""} == {**short.task.args, "suffix": ""}
    assert steps_to_reward([1.0] * 20, SHAPES["long"].target, OVER) is None


def test_the_other_side_has_the_same_settings_and_the_same_reward(tmp_path):
    config = configuration(tmp_path, tmp_path / "model", "run", 3, Shape(7, TARGET))
    asked = job(config, tmp_path, TARGET, bf16=True)
    assert (asked.steps, asked.seed, asked.lr, asked.eps_high) == (
        7,
        3,
        config.learner.optimizer.lr,
        config.algo.eps_high,
    )
    assert (asked.group_size, asked.groups_per_step) == (config.generate.group_size, config.replay.groups_per_step)
    task = build_task(config.task, 3, split="train")
    answer = task.prompt(0).answer
    assert answer is not None
    said = [[{"role": "assistant", "content": text}] for text in (f"It is {answer}.", answer + "1", "")]
    assert peers_trl.right(completions=said, answer=[answer] * 3) == [1.0, 0.0, 0.0]


def test_what_training_reads_counts_a_prompt_once_a_group_or_once_an_answer(tmp_path):
    config = configuration(tmp_path, tmp_path / "model", "run", 3, Shape(7, TARGET))
    groups, size = config.replay.groups_per_step, config.generate.group_size
    run = run_of(60.0, 50.0)
    said = peers.reading(20.0, [{"streamrl, x": run, "TRL, x": run}], config)
    assert f"reads {20 * groups + 5 * groups * size} tokens" in said
    assert f"TRL's {25 * groups * size}," in said


def test_a_model_that_is_not_there_is_told_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["peers", "--model", str(tmp_path / "none")])
    assert peers.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--model: ")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", ["short", "long"])
def test_both_sides_train_a_tiny_model_with_chat_messages(shape, tmp_path):
    model = tmp_path / "model"
    tiny_model.make(model)
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--quick", "--model", str(model), "--python", sys.executable]
    done = subprocess.run(
        [*command, "--shape", shape, "--json", str(figures)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())
    assert (found["shape"], found["machine"]) == (shape, peers.machine())
    (repeat,) = found["repeats"]
    dtypes = [name.removeprefix("TRL, ") for name in repeat if name.startswith("TRL")]
    assert "float32" in dtypes
    assert list(repeat) == [f"{engine}, {dtype}" for engine in ("streamrl", "TRL") for dtype in dtypes]
    assert all(run["tokens_per_s"] > 0 for run in repeat.values())

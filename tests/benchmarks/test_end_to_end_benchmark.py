"""The end-to-end benchmark: its lengths, its cores, its sides alone, what it counts and what it judges."""

from __future__ import annotations

import asyncio
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import drawn_lengths, one_side
from benchmarks.balanced_run import AT_ONCE, BOUND_4, GROUPS, LOADS, ONE_STEP_OFF, SETTINGS, SYNC, Bench
from benchmarks.end_to_end import FULL, expected, nearest, turns
from benchmarks.fault_roles import TOKENS
from benchmarks.optimum import Repeat, Run, Sides, all_sides, lines, missed, of_medians, parts, ratios
from benchmarks.pinned import on_core, two_cores
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.observe.metrics import read_metrics
from streamrl.tasks.environment import Completion
from streamrl.tasks.registry import build_task

SLOWEST = 60.0  # seconds that the processes of a test may take


def test_lengths_are_log_normal_with_sigma_0_8_and_the_same_in_every_run():
    lengths = [drawn_lengths.drawn_length(prompt, sample) for prompt in range(5000) for sample in range(4)]
    assert lengths[:8] == [drawn_lengths.drawn_length(prompt, sample) for prompt in range(2) for sample in range(4)]
    assert statistics.mean(lengths) == pytest.approx(drawn_lengths.MEAN, rel=0.03)  # the cut takes some of it
    assert statistics.stdev(map(math.log, lengths)) == pytest.approx(0.8, rel=0.03)
    assert max(lengths) == drawn_lengths.LONGEST


class _Repeater:
    """An inference handle whose policy copies the prompt over and over, with every tenth token wrong."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def generate(self, prompt: str, n: int, **sampling: Any) -> list[Completion]:
        self.asked.append(sampling)
        ids = np.arange(2, 6, dtype=np.int32)
        output = np.resize(ids, sampling["max_new_tokens"])
        output[9::10] = 0
        nothing = np.zeros(len(output), np.float32)
        answer = Completion(
            text="", prompt_ids=ids, output_ids=output, logprobs=nothing, spans=(), finish_reason="length"
        )
        return [answer] * n


def test_each_sample_is_asked_for_its_own_length_and_scored_by_its_tokens():
    config = Config.model_validate({"task": {"name": "benchmarks.drawn_lengths:DrawnLengths"}})
    task = build_task(config.task, seed=1, split="train")
    inference = _Repeater()
    rollouts = asyncio.run(task.rollout_group(inference, task.prompt(7), 4))
    wanted = [drawn_lengths.drawn_length(7, sample) for sample in range(4)]
    assert [asked["max_new_tokens"] for asked in inference.asked] == wanted
    for length, rollout in zip(wanted, rollouts, strict=True):
        assert rollout.reward == pytest.approx(1 - (length // 10) / length)


def test_a_process_and_its_children_stay_on_their_core():
    _, core = two_cores()
    child = "import os; print(sorted(os.sched_getaffinity(0)))"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    done = subprocess.run(
        on_core(core, [sys.executable, "-c", parent]), capture_output=True, text=True, timeout=SLOWEST
    )
    assert done.stdout.strip() == f"[{core}]", done.stderr


@pytest.fixture
def bench(tmp_path) -> Any:
    """Without a server; the cores that this process may use are given back."""
    cores = os.sched_getaffinity(0)
    yield Bench(tmp_path)
    os.sched_setaffinity(0, cores)


def test_the_settings_are_what_their_names_say(bench):
    configs = {each.name: bench.config(each.slug, 8, each.keys) for each in SETTINGS}
    for name, setting in ((each.name, each) for each in SETTINGS):
        assert configs[name].replay.bound == setting.bound
        assert configs[name].replay.slots == (setting.bound + 1) * GROUPS
    samples = GROUPS * configs["sync"].generate.group_size
    assert samples == 4 * configs["sync"].generate.server_args["max_running_requests"]
    one_step_off = configs[ONE_STEP_OFF.name]
    assert one_step_off.publish.interruption == "drain"
    assert one_step_off.generate.groups_in_flight == one_step_off.replay.groups_per_step
    assert configs["bound 2"].publish.interruption == "retract"
    assert (configs["bound 4"].replay.release, configs["bound 4, at once"].replay.release) == ("just_in_time", "eager")


def _rows(generated: float, trained: float, seconds: float, wait: float = 0.0) -> list[dict[str, float]]:
    """Steps that all take as long."""
    return [
        {
            "time": 100 + seconds * step,
            "time/step": seconds,
            "time/wait": wait,
            "time/forward": 0.25 * (seconds - wait),
            "time/backward": 0.5 * (seconds - wait),
            "tokens/generated": generated,
            "tokens/trained": trained,
            "reward/mean": 0.01 * step,
            "idle/learner": 0.2,
            "idle/generator": 0.0,
        }
        for step in range(20)
    ]


def test_tokens_that_came_out_of_the_buffer_are_no_speed():
    ages = np.array([0, 1, 2, 2])
    run = Run.of(FULL.counted(_rows(900, 1000, 2.0)), ages)
    assert run.tokens_per_s == pytest.approx(450)
    assert Run.of(FULL.counted(_rows(1200, 1000, 2.0)), ages).tokens_per_s == pytest.approx(500)
    assert run.reward_per_s == pytest.approx(0.005)
    assert run.staleness_mean == 1.25


@pytest.mark.parametrize(
    ("generation", "chosen"), [(1000, "one pass"), (840, "one pass with activations"), (580, "two passes")]
)
def test_the_learner_gets_the_load_that_makes_it_as_slow_as_generation(generation, chosen):
    """One second of work for 1,000 tokens: a quarter of it is a forward pass, half of it a backward pass."""
    rows = FULL.counted(_rows(0, 1000, 1.5, wait=0.5))
    speeds = {load: expected(load, rows) for load in LOADS}
    load = nearest(speeds, generation)[0]
    assert load.name.startswith(chosen)
    assert speeds[load] == pytest.approx(generation, rel=0.1)
    assert all(len(each.changes) == sum(map(len, each.keys.values())) for each in LOADS)


def _repeat(sync: float, bound_2: float, generation: float = 1000, training: float = 1100, **others: float) -> Repeat:
    run = {"staleness_mean": 1, "staleness_p95": 2, "reward_per_s": 0, "idle_learner": 0, "idle_generator": 0}
    speeds = {"sync": sync, "bound 2": bound_2, **others}
    runs = {name: Run(tokens_per_s=speed, **run) for name, speed in speeds.items()}
    return Repeat((generation - 10, generation, 3 * generation), (training, training + 1, 1.0), runs)


def test_the_sides_are_measured_between_the_settings_evenly_and_every_setting_has_its_turn():
    for count in (1, 2, 3, 5):
        order = turns(SETTINGS, count)
        assert [each for each in order if each is not None] == list(SETTINGS)
        assert order.count(None) == count
    assert [index for index, each in enumerate(turns(SETTINGS, 3)) if each is None] == [0, 5, 9]


def test_a_run_that_leaves_no_core_idle_has_twice_that_of_balanced_sides_in_turn_at_the_most():
    assert Sides(500, 500).ceiling == pytest.approx(2)
    assert (Sides(600, 500).in_turn, Sides(600, 500).ceiling) == (pytest.approx(272.7, abs=0.1), pytest.approx(11 / 6))
    assert Sides(500, 600).ceiling == pytest.approx(11 / 6)
    assert Sides(1e9, 500).ceiling == pytest.approx(1, rel=1e-5)


def test_a_ratio_is_paired_within_a_repeat_or_of_medians():
    repeats = [_repeat(500, 900), _repeat(250, 600, generation=500), _repeat(400, 1000, generation=800)]
    assert ratios(repeats)["bound 2 of sync"] == [1.8, 2.4, 2.5]
    assert ratios(repeats)["bound 2 of the optimum"] == [0.9, 1.2, 1.25]
    # Medians: bound 2 900, sync 400; generation of 490, 500, 790, 800, 990, 1000, 1500, 2400, 3000, training 1100.
    assert of_medians(repeats) == {
        "sync of the optimum": 400 / 990,
        "bound 2 of the optimum": 900 / 990,
        "bound 2 of sync": 2.25,
    }


def test_tickets_just_in_time_are_compared_with_those_at_once_under_the_same_bound():
    speeds = [(950.0, 1000.0), (930.0, 900.0), (990.0, 1000.0)]
    repeats = [_repeat(500, 900, **{BOUND_4.name: late, AT_ONCE.name: early}) for late, early in speeds]
    name = "bound 4 of bound 4, at once"
    assert ratios(repeats)[name] == [0.95, 930 / 900, 0.99]
    assert of_medians(repeats)[name] == 0.95
    *_, told = lines(repeats, "bound 2")
    assert told == "tickets just in time, bound 4 of bound 4, at once: 0.99 (0.95 .. 1.03), of medians 0.95"


def test_what_a_run_has_against_sync_is_the_product_of_its_parts():
    repeats = [_repeat(500, 900), _repeat(250, 600, generation=500), _repeat(400, 1000, generation=800)]
    assert all_sides(repeats) == Sides(990, 1100)
    found = parts(repeats, "bound 2")
    assert found["ceiling"] == pytest.approx(1 + 990 / 1100)
    assert math.prod(found.values()) == pytest.approx(of_medians(repeats)["bound 2 of sync"])
    told = "\n".join(lines(repeats, "bound 2"))
    assert "generation alone: 990 (490 .. 3000) tokens/s, 9 measurements" in told
    assert "has 1.90 times in turn at the most (2 at perfect balance)" in told
    assert "bound 2 of sync, of medians: 2.25 = 0.91 of the optimum x 1.90" in told


def test_a_bar_is_missed_by_the_median_alone_and_only_balanced_sides_are_judged():
    assert missed([_repeat(500, 900)]) == []
    assert missed([_repeat(500, 900), _repeat(500, 880), _repeat(500, 700)]) == []
    assert missed([_repeat(500, 800)]) == ["bound 2 of the optimum: 0.80, at least 0.85 is wanted"]
    assert missed([_repeat(700, 900)]) == ["bound 2 of sync: 1.29, at least 1.5 is wanted"]
    assert missed([_repeat(500, 900, training=1200)]) == [
        "one side is 20% slower than the other, at most 15% is balanced"
    ]


def test_a_learner_that_takes_no_time_takes_every_batch_of_the_real_service(tmp_path):
    """With a worker that answers at once: what is alone in `generation_alone`, without a server."""
    config = Config.model_validate(
        {
            "run": {"folder": tmp_path, "name": "run", "steps": 5},
            "replay": {"groups_per_step": 4, "max_staleness": 5},
            "publish": {"timeout": 0.5},
            "learner": {"tick": 0.05},
        }
    )
    run_folder = tmp_path / "run"
    for name in ("events", "journal", "logs", "locks"):
        (run_folder / name).mkdir(parents=True)
    config_file.save(config, run_folder / "config.yaml")
    commands = [
        ["-m", "streamrl.cli", "replay", "--run-folder", str(run_folder)],
        ["-m", "benchmarks.fault_roles", "worker", str(run_folder), "0"],
        one_side.taker(run_folder)[1:],
    ]
    processes = [subprocess.Popen([sys.executable, *command]) for command in commands]
    try:
        deadline = time.monotonic() + SLOWEST
        codes = [process.wait(deadline - time.monotonic()) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0, 0]
    rows = list(read_metrics(run_folder))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert sum(row["tokens/generated"] for row in rows) == 5 * 4 * config.generate.group_size * TOKENS


@pytest.mark.slow
@pytest.mark.timeout(20 * SLOWEST)
def test_the_quick_form_runs_with_real_parts_each_side_on_its_core(tmp_path):
    """Minutes, most of them for the starts of a server and four learners."""
    target = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.end_to_end", "--quick", "--json", str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        seen = _affinities(process)
        told = process.communicate(timeout=SLOWEST)[0]
    assert process.returncode == 0, told
    generating, training = two_cores()
    learners = {cores for words, cores in seen if "learner" in words or "retrain" in words}
    others = {cores for words, cores in seen if "generator" in words or "streamrl.engine.launch" in words}
    assert learners == {(training,)}
    assert others == {(generating,)}
    result = json.loads(target.read_text())
    assert {ratio["name"] for ratio in result["ratios"]} >= {"bound 2 of the optimum", "bound 2 of sync"}
    assert result["of_medians"].keys() == {ratio["name"] for ratio in result["ratios"]}
    assert 1 <= result["sides"]["ceiling"] <= 2
    assert [len(result["repeats"][0][side]) for side in ("generation", "training")] == [1, 1]
    assert result["repeats"][0]["runs"][SYNC.name]["staleness_p95"] == 0
    assert result["repeats"][0]["runs"]["bound 2"]["staleness_p95"] <= 2


def _affinities(root: subprocess.Popen[str]) -> set[tuple[tuple[str, ...], tuple[int, ...]]]:
    """(command line, cores) of every process below `root`, all of its threads, looked at until it ends."""
    seen = set()
    deadline = time.monotonic() + 20 * SLOWEST
    while root.poll() is None and time.monotonic() < deadline:
        for process in psutil.Process(root.pid).children(recursive=True):
            try:
                words = tuple(process.cmdline())
                if "benchmarks.pinned" not in words:  # it is on its way to its core
                    seen |= {(words, tuple(sorted(os.sched_getaffinity(each.id)))) for each in process.threads()}
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        time.sleep(1.0)
    return seen

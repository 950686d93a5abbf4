"""`streamrl sweep`: what a file means, what is run again and what is not, and what the seeds add up to."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml

from streamrl import cli, model_dtype
from streamrl.api import launching
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.lab.sweep import command, runner
from streamrl.lab.sweep.differences import bootstrap, difference, ratio
from streamrl.lab.sweep.estimates import Estimate, band, estimate, student_t
from streamrl.lab.sweep.figures import figures, reward_curves, staleness_shares, sum_to
from streamrl.lab.sweep.plan import override, read
from streamrl.lab.sweep.results import collect, markdown
from streamrl.lab.sweep.servers import server_kind
from streamrl.observe.events import event_path

EXPERIMENTS = sorted(Path("configs/experiments").glob("*.yaml"))


@pytest.fixture
def make_sweep(tmp_path: Path, model_folders: tuple[Path, Path]) -> Callable[..., Path]:
    """`make_sweep(grid=..., seeds=...)`: a sweep file whose runs need servers of their own, so that none is started."""
    (tmp_path / "base.yaml").write_text(
        f"generate: {{attach: ['http://127.0.0.1:1']}}\nrun: {{steps: 3}}\nmodel: {{path: {model_folders[0]}}}\n"
    )

    def make(**tree: object) -> Path:
        file = tmp_path / "mine.yaml"
        file.write_text(
            yaml.safe_dump({"base": "base.yaml", "folder": str(tmp_path / "sweeps"), **tree}, sort_keys=False)
        )
        return file

    return make


def end_run(folder: Path, steps: int) -> None:
    """The events by which the replay service says that a run has come to its end."""
    events = [{"event": "learner.finished", "version": f"{steps}.0"}, {"event": "replay.stop", "code": 0}]
    path = event_path(folder, "replay")
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"time": 0.0, "role": "replay-0", **each}) + "\n" for each in events))


class Trained:
    """Replaces `streamrl train`: writes what a run with this configuration would leave, as told."""

    def __init__(self, codes: dict[str, int] | None = None) -> None:
        self.codes = codes or {}
        self.runs: list[str] = []

    def __call__(self, config: Config) -> int:
        self.runs.append(config.run.name)
        code = self.codes.get(config.run.name, 0)
        folder = config.run_folder
        folder.mkdir(parents=True, exist_ok=True)
        config_file.save(config, folder / "config.yaml")
        if code == 0:
            rows = [row(step, config.run.seed) for step in range(1, config.run.steps + 1)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
            end_run(folder, config.run.steps)
        return code


def row(step: int, seed: int = 1, **more: float) -> dict[str, float]:
    return {
        "step": step, "reward/mean": seed / 10 + step / 100, "pass_rate": 0.5, "tokens/trained": 100,
        "tokens/generated": 200, "time/step": 2.0, "staleness/mean": 1.0, "staleness/max": 2, "offpolicy/ess": 0.9,
        "offpolicy/kl": 0.01, "weights/masked": 0.0, "idle/learner": 0.25, "idle/generator": 0.5,
        "tokens/trained/s0": 25, "tokens/trained/s1": 75, **more,
    }  # fmt: skip


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_experiment_expands_and_every_point_is_a_valid_configuration_with_several_seeds(file):
    sweep = read(file)
    jobs = sweep.jobs()
    assert len(jobs) == len(sweep.points) * len(sweep.seeds)
    assert len(sweep.seeds) >= 3
    assert len({job.name for job in jobs}) == len(jobs)
    assert len({server_kind(job.config) for job in jobs}) == 1  # one set of servers for all of it


def test_there_is_an_experiment_of_each_kind():
    names = {file.stem for file in EXPERIMENTS}
    of_staleness = {"corrections", "corrections_pretrained", "freshness", "reuse", "staleness"}
    assert names == {"group_size", "interruption", "order", "publish_interval"} | of_staleness


def test_each_correction_changes_one_setting_of_the_default_or_of_the_recomputed_proximal_policy():
    sweep = read(Path("configs/experiments/corrections.yaml"))
    configs = {job.point.name: job.config for job in sweep.jobs() if job.seed == 1}
    assert configs[sweep.baseline].algo == Config().algo
    for name, config in configs.items():
        other = configs["recompute" if name.startswith("recompute-") else "default"]
        if config is not other:
            assert len(set(config_file.changed(other, config)) - {"run.name"}) == 1, name


def test_the_staleness_experiment_has_four_points_of_the_corrections_under_four_other_bounds():
    own = [job for job in read(Path("configs/experiments/staleness.yaml")).jobs() if job.seed == 1]
    others = read(Path("configs/experiments/corrections.yaml")).jobs()
    others = {job.point.name: job.config for job in others if job.seed == 1}
    assert sorted({job.config.replay.max_staleness for job in own}) == [0, 2, 8, 16]
    assert len(own) == 4 * len({job.point.series for job in own}) == 16
    for job in own:
        differ = {"replay.max_staleness", "run.name", "run.folder"}
        assert set(config_file.changed(others[job.point.series], job.config)) == differ


def test_a_grid_is_every_combination_and_points_are_settings_that_go_together(make_sweep):
    sweep = read(
        make_sweep(
            grid={"replay.max_staleness": [0, 2], "algo.eps_low": [0.1, 0.2]},
            points=[{"name": "plain", "algo.weight": "none"}, {"name": "token", "algo.weight": "token"}],
            seeds=[5, 7],
        ),
        ["run.steps=9"],
    )
    jobs = sweep.jobs()
    got = {
        (job.config.replay.max_staleness, job.config.algo.eps_low, job.config.algo.weight, job.config.run.seed)
        for job in jobs
    }
    assert got == set(itertools.product((0, 2), (0.1, 0.2), ("none", "token"), (5, 7)))
    assert {job.config.run.steps for job in jobs} == {9}
    assert jobs[0].name == "max_staleness_0-eps_low_0.1-plain-seed5"
    assert (jobs[0].point.column, jobs[0].point.series) == ("0", "plain, eps low 0.1")


def test_every_point_is_run_once_before_any_is_run_with_its_second_seed(make_sweep):
    jobs = read(make_sweep(grid={"replay.max_staleness": [0, 2, 4]}, seeds=[1, 2])).jobs()
    assert [job.seed for job in jobs] == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    "value", ["none", "true", "5", "1e-6", "two words", "", True, None, 3, 1e-6, [1, 2], {"a": "b"}]
)
def test_an_override_gives_back_the_value_that_it_was_made_of(value):
    key, _, text = override("some.key", value).partition("=")
    assert (key, config_file.parse_yaml(text, where=key)) == ("some.key", value)


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"grids": {}}, "grids: no key of a sweep file; allowed: name, folder, base"),
        ({"grid": {"replay.max_staleness": 2}}, "grid.replay.max_staleness: 2 is not allowed; allowed: a list"),
        ({"grid": {"replay.max_stale": [2]}}, "point max_stale_2: replay.max_stale: unknown key"),
        (
            {"grid": {"replay.max_staleness": [-1]}},
            "point max_staleness_-1: replay.max_staleness: -1 is not allowed",
        ),
        ({"points": [{"algo.weight": "none"}]}, "points[0]: its name is missing"),
        ({"points": [{"name": "a"}, {"name": "a"}]}, "two points are called a"),
        ({"seeds": [1, 1]}, "seeds: [1, 1] is not allowed"),
        ({"target": "high"}, "target: 'high' is not allowed; allowed: a reward, a number"),
        ({"points": [{"name": "a"}, {"name": "b"}], "baseline": "c"}, "baseline: c is no point; allowed: a, b"),
        (
            {"points": [{"name": "a", "algo.eps_low": 0.2}], "grid": {"algo.eps_low": [0.1]}},
            "points: algo.eps_low is in `grid` as well; allowed: in one of them",
        ),
        (
            {"points": [{"name": "a"}], "grid": {"algo.eps_low": [0.1]}, "baseline": "c"},
            "baseline: c is no point; allowed: eps_low_0.1-a, a",
        ),
        ({"set": {"run.seed": 3}}, "run.seed: the sweep gives it to each run"),
        ({"set": {"algo.kl": 0.1}, "grid": {"algo.kl": [0.1, 0.2]}}, "set: algo.kl is swept over"),
        ({"name": "a/b"}, "name: 'a/b' is no folder name"),
    ],
)
def test_a_sweep_file_that_does_not_fit_is_refused_with_one_line(make_sweep, capsys, tree, line):
    assert cli.main(["sweep", str(make_sweep(**tree))]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("word", ["run.seed=7", "run.name=mine", "run.folder=elsewhere"])
def test_what_the_sweep_gives_to_each_run_is_refused_on_the_command_line_too(make_sweep, capsys, word):
    assert cli.main(["sweep", str(make_sweep()), word]) == 2
    assert f"{word.partition('=')[0]}: the sweep gives it to each run" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["--results", "--print-jobs"])
def test_what_starts_nothing_sets_no_sweep_aside(make_sweep, tmp_path, capsys, part):
    file = make_sweep(seeds=[1])
    run(file, Trained())
    assert cli.main(["sweep", str(file), part, "--fresh"]) == 2
    assert "--fresh: nothing is started" in capsys.readouterr().err
    assert [folder.name for folder in (tmp_path / "sweeps").iterdir()] == ["mine"]


def run(file: Path, trained: Trained, *overrides: str) -> list[str]:
    """Run what is not done. Returns the names of the runs that failed."""
    sweep = read(file, overrides)
    return runner.run_jobs(sweep, sweep.jobs(), trained)


def test_done_runs_are_passed_over_a_failed_one_is_told_and_run_again(make_sweep, capsys):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]}, seeds=[1, 2])
    first = Trained({"max_staleness_2-seed1": 1})
    assert run(file, first) == ["max_staleness_2-seed1"]
    assert len(first.runs) == 4  # the failed one did not end the sweep
    assert "max_staleness_2-seed1: FAILED: exit code 1" in capsys.readouterr().out
    assert run(file, second := Trained()) == []
    assert second.runs == ["max_staleness_2-seed1"]
    assert run(file, third := Trained()) == []
    assert third.runs == []


def test_fresh_keeps_the_former_sweep_and_starts_a_new_one_and_failed_runs_make_the_exit_code_1(
    make_sweep, tmp_path, capsys
):
    file = make_sweep(seeds=[1])
    failing = Trained({"base-seed1": 1})
    assert command.main(file, [], failing) == 1
    assert "1 of 1 runs failed: base-seed1" in capsys.readouterr().err
    assert command.main(file, [], failing, fresh=True) == 1
    assert len(failing.runs) == 2
    assert (tmp_path / "sweeps" / "mine.1" / "results.json").exists()


def test_a_run_with_steps_of_other_settings_is_neither_done_nor_gone_on_with(make_sweep, tmp_path, capsys):
    file = make_sweep(seeds=[1])
    run(file, Trained())
    folder = tmp_path / "sweeps" / "mine" / "runs" / "base-seed1"
    for setting, was in (("algo.eps_low=0.1", "0.2"), ("replay.release=eager", "just_in_time"), ("run.steps=2", "3")):
        assert run(file, again := Trained(), setting) == ["base-seed1"]
        assert again.runs == []
        key, now = setting.split("=")
        refused = f"{key}: {now}, and 3 steps in {folder} were made with {was}; allowed: the same, without that folder"
        assert f"base-seed1: FAILED: {refused}, or --fresh\n" in capsys.readouterr().out
    assert run(file, longer := Trained(), "run.steps=5") == []
    assert longer.runs == ["base-seed1"]
    assert run(file, done := Trained(), "run.steps=5", "run.exit_interval=5") == []
    assert done.runs == []


def test_a_run_that_made_no_step_may_have_other_settings(make_sweep):
    file = make_sweep(seeds=[1])
    assert run(file, Trained({"base-seed1": 1})) == ["base-seed1"]
    assert run(file, again := Trained(), "algo.eps_low=0.1") == []
    assert again.runs == ["base-seed1"]


def test_a_run_that_failed_after_its_last_step_is_not_done(make_sweep, tmp_path):
    file = make_sweep(seeds=[1])
    assert run(file, Trained()) == []
    event_path(tmp_path / "sweeps" / "mine" / "runs" / "base-seed1", "replay").unlink()
    assert command.main(file, [], lambda config: 1) == 1
    results = json.loads((tmp_path / "sweeps" / "mine" / "results.json").read_text())
    assert results["points"][0]["unfinished"] == {"1": 3}


def test_a_sweep_that_runs_is_left_alone_by_a_second_one(make_sweep, tmp_path):
    file = make_sweep(seeds=[1])

    def train(config: Config) -> int:
        for fresh in (False, True):
            with pytest.raises(
                ConfigError, match=f"{tmp_path / 'sweeps' / 'mine'} is in use by another `streamrl sweep`"
            ):
                command.main(file, [], Trained(), fresh=fresh)
        return Trained()(config)

    assert command.main(file, [], train) == 0
    assert command.main(file, [], Trained()) == 0


def test_sigterm_between_two_runs_ends_the_sweep_as_a_signal_within_one_does(make_sweep, capsys):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]})
    before = signal.getsignal(signal.SIGTERM)

    def train(config: Config) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError

    assert command.main(file, [], train) == 130
    assert "streamrl: interrupted; this goes on with it: " in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


class Interrupted:
    """A supervisor that was interrupted and could save nothing."""

    interrupts = 2

    def run(self) -> int:
        return 1


def test_an_interrupted_run_that_could_save_nothing_ends_the_sweep_too(make_sweep, monkeypatch):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]})
    started: list[str] = []

    @contextmanager
    def launched(config: Config) -> Iterator[Interrupted]:
        started.append(config.run.name)
        yield Interrupted()

    monkeypatch.setattr(launching, "launched", launched)
    assert cli.main(["sweep", str(file)]) == 130
    assert started == ["max_staleness_0-seed1"]


def test_with_fresh_the_dtype_of_the_former_runs_does_not_count(make_sweep, monkeypatch):
    file = make_sweep(set={"model.dtype": "auto"}, seeds=[1])
    monkeypatch.setattr(model_dtype, "bfloat16_instructions", lambda: None)
    assert run(file, Trained()) == []
    monkeypatch.setattr(model_dtype, "bfloat16_instructions", lambda: "avx512_bf16")
    dtypes: list[str] = []

    def train(config: Config) -> int:
        dtypes.append(config.model.dtype)
        return Trained()(config)

    assert command.main(file, [], train, fresh=True) == 0
    assert dtypes == ["bfloat16"]


def test_a_signal_ends_the_sweep_with_130_and_the_next_start_goes_on(make_sweep):
    file = make_sweep(grid={"replay.max_staleness": [0, 2, 4]})
    assert command.main(file, [], first := Trained({"max_staleness_2-seed1": runner.INTERRUPTED})) == 130
    assert first.runs == ["max_staleness_0-seed1", "max_staleness_2-seed1"]
    assert run(file, second := Trained()) == []
    assert second.runs == ["max_staleness_2-seed1", "max_staleness_4-seed1"]


def test_a_refused_run_is_told_by_its_line_and_does_not_end_the_sweep(make_sweep, capsys):
    def train(config: Config) -> int:
        if config.replay.max_staleness == 0:
            raise ConfigError("model.path: nothing is no model")
        return Trained()(config)

    sweep = read(make_sweep(grid={"replay.max_staleness": [0, 2]}))
    assert runner.run_jobs(sweep, sweep.jobs(), train) == ["max_staleness_0-seed1"]
    assert "max_staleness_0-seed1: FAILED: model.path: nothing is no model" in capsys.readouterr().out


def test_the_results_of_a_sweep_are_means_with_intervals_over_the_seeds(make_sweep, tmp_path):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]}, seeds=[1, 2, 3])
    assert command.main(file, [], Trained({"max_staleness_2-seed3": 1})) == 1
    folder = tmp_path / "sweeps" / "mine"
    points = json.loads((folder / "results.json").read_text())["points"]
    reward = points[0]["figures"]["reward"]
    assert reward["mean"] == pytest.approx(0.23)  # 0.13, 0.23 and 0.33 in the last step
    assert reward["half_width"] == pytest.approx(4.3027 * 0.1 / math.sqrt(3))
    assert points[1]["figures"]["reward"]["seeds"] == 2
    assert points[1]["unfinished"] == {"3": 0}
    assert points[0]["staleness"]["s1"] == 0.75
    text = (folder / "results.md").read_text()
    assert "| max_staleness_0 | 3 of 3 | 0.2 ± 0.2 |" in text
    assert "| max_staleness_2 | 2 of 3 |" in text
    for name in ("reward", "figures", "staleness"):
        assert (folder / f"{name}.svg").read_text().startswith("<?xml")
        assert (folder / f"{name}.png").stat().st_size > 0


def test_every_other_point_is_compared_with_the_baseline_seed_by_seed(make_sweep, tmp_path, capsys):
    points = [{"name": "first", "run.steps": 3}, {"name": "second", "run.steps": 5}]
    file = make_sweep(points=points, baseline="second", seeds=[1, 2, 3])
    assert command.main(file, [], Trained({"first-seed3": 1})) == 1
    results = json.loads((tmp_path / "sweeps" / "mine" / "results.json").read_text())
    assert results["baseline"] == "second"
    first, second = results["points"]
    assert second["differences"]["reward"]["mean"] == 0
    assert first["differences"]["reward"]["seeds"] == 2
    assert first["differences"]["reward"]["mean"] == pytest.approx(-0.02)  # steps 3 and 5, whatever the seed's reward
    assert first["differences"]["reward"]["half_width"] == pytest.approx(0)
    text = (tmp_path / "sweeps" / "mine" / "results.md").read_text()
    assert "| first | 2 | -0.02 | -0.020 .. -0.020 | -0.020 .. -0.020 | -0.01 |" in text
    assert "| second | 3 | 0" not in text
    assert "difference from second with the same seed" in text
    assert "difference from second with the same seed" in capsys.readouterr().out


def test_with_a_grid_each_point_is_compared_with_that_of_the_same_values(make_sweep, tmp_path):
    points = [{"name": "plain"}, {"name": "short", "run.steps": 3}]
    grid = {"replay.max_staleness": [0, 2], "algo.eps_low": [0.1, 0.2]}
    file = make_sweep(points=points, grid=grid, baseline="plain", seeds=[1, 2])
    assert [(point.name, point.baseline) for point in read(file).points][2:4] == [
        ("max_staleness_0-eps_low_0.2-plain", "max_staleness_0-eps_low_0.2-plain"),
        ("max_staleness_0-eps_low_0.2-short", "max_staleness_0-eps_low_0.2-plain"),
    ]
    assert command.main(file, [], Trained()) == 0
    text = (tmp_path / "sweeps" / "mine" / "results.md").read_text()
    assert "difference from plain of the same grid values with the same seed" in text
    compared = text.partition("| point | pairs |")[2]
    assert [line.split(" | ")[0] for line in compared.splitlines()[2:6]] == [
        f"| max_staleness_{bound}-eps_low_{low}-short" for bound in (0, 2) for low in (0.1, 0.2)
    ]
    whole = read(make_sweep(points=points, grid=grid, baseline="max_staleness_2-eps_low_0.1-plain"))
    assert {point.baseline for point in whole.points} == {"max_staleness_2-eps_low_0.1-plain"}


def test_the_first_point_is_the_baseline_and_one_point_alone_is_compared_with_nothing(make_sweep):
    assert read(make_sweep(grid={"replay.max_staleness": [2, 0]})).baseline == "max_staleness_2"
    sweep = read(file := make_sweep(seeds=[1, 2]))
    run(file, Trained())
    assert "difference" not in markdown(sweep, collect(sweep, sweep.jobs()))


def test_a_difference_has_students_interval_of_the_pairs_alone():
    found = difference({1: 0.5, 2: 0.9, 3: 0.7, 7: 9.0}, {1: 0.3, 2: 0.6, 3: 0.6, 9: 5.0})
    assert found is not None
    assert found.estimate == estimate([0.5 - 0.3, 0.9 - 0.6, 0.7 - 0.6])
    assert difference({1: 0.5}, {2: 0.5}) is None
    alone = difference({1: 0.5}, {1: 0.25})
    assert alone is not None
    assert (alone.estimate.mean, alone.student, alone.bootstrap) == (0.25, "-", "-")


def test_the_order_in_which_the_seeds_are_stored_changes_no_interval():
    some = {seed: 1 + (seed * 0.37) % 1 for seed in range(1, 11)}
    others = dict(sorted(some.items(), key=lambda each: str(each[0])))
    baseline = dict.fromkeys(some, 1.0)
    assert difference(some, baseline) == difference(others, baseline)
    assert ratio(some, baseline) == ratio(others, baseline)


def test_tokens_are_counted_until_the_mean_reward_of_ten_steps_is_the_target():
    rows = [{"reward/mean": step / 10, "tokens/generated": 100} for step in range(20)]
    assert sum_to(0.45, "tokens/generated")(rows) == 1000  # steps 0 to 9
    assert sum_to(0.55, "tokens/generated")(rows) == 1100
    assert sum_to(2.0, "tokens/generated")(rows) is None
    assert sum_to(0.0, "tokens/generated")(rows[:9]) is None
    unknown = [{"reward/mean": None if step % 5 else -0.9, "tokens/generated": 100} for step in range(20)]
    assert sum_to(-0.5, "tokens/generated")(unknown) is None


def test_a_sweep_with_a_target_says_how_many_runs_reach_it_and_the_ratio_of_tokens(make_sweep, tmp_path, capsys):
    points = [{"name": "first", "run.steps": 12}, {"name": "second", "run.steps": 10}]
    file = make_sweep(points=points, target=0.16, seeds=[1, 2, 3])
    assert command.main(file, [], Trained()) == 0
    results = json.loads((tmp_path / "sweeps" / "mine" / "results.json").read_text())
    assert results["target"] == 0.16
    told = {each["name"]: each for each in results["figures"][-3:]}
    assert [told[name]["unit"] for name in ("tokens to target", "trained to target", "seconds to target")] == [
        "tokens", "tokens", "s"
    ]  # fmt: skip
    assert all("0.16" in each["meaning"] for each in told.values())
    text = (tmp_path / "sweeps" / "mine" / "results.md").read_text()
    first, second = (line for line in text.splitlines() if line.startswith(("| first | 3 of", "| second | 3 of")))
    assert "| 2067 ± 287 |" in first  # 2200 where the reward is lowest
    assert "| 2000 (2/3) |" in second
    assert any(line.startswith("| second | 2 | 1.00 | 1.00 .. 1.00 | 1.00 .. 1.00 |") for line in text.splitlines())
    assert "ratio to first with the same seed of what a reward of 0.16 took" in text


def test_a_ratio_is_of_the_seeds_that_both_have_and_multiplies():
    assert ratio({1: 2.0}, {2: 1.0}) is None
    assert ratio({1: 0.0, 2: 1.0}, {1: 1.0, 2: 0.0}) is None
    alone = ratio({1: 2.0}, {1: 4.0})
    assert alone is not None
    assert alone.cells() == ["0.50", "-", "-"]
    several = ratio({1: 1.0, 2: 4.0, 3: 9.0}, {1: 2.0, 2: 2.0})
    assert several is not None
    assert (several.mean, several.seeds) == (pytest.approx(1.0), 2)


def test_the_bootstrap_gives_the_same_interval_again_between_the_smallest_and_the_largest_value():
    values = [0.1, -0.3, 0.2, 0.05, 0.4]
    assert bootstrap(values) == bootstrap(values)
    low, high = bootstrap(values)
    assert -0.3 < low < sum(values) / 5 < high < 0.4
    exact = sorted(sum(drawn) / 5 for drawn in itertools.product(values, repeat=5))
    assert low == pytest.approx(np.quantile(exact, 0.025), abs=0.02)
    assert high == pytest.approx(np.quantile(exact, 0.975), abs=0.02)


def test_the_bootstrap_of_five_seeds_is_as_much_too_narrow_as_its_docstring_says():
    random = np.random.default_rng(3)
    hits = [low <= 0 <= high for low, high in map(bootstrap, random.normal(size=(1000, 5)).tolist())]
    assert np.mean(hits) == pytest.approx(0.85, abs=0.04)


def test_what_is_to_do_is_told_before_it_begins_and_how_long_by_the_runs_that_have_ended(make_sweep, capsys):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]}, seeds=[1, 2])
    assert command.main(file, [], Trained({"max_staleness_2-seed2": 1})) == 1
    first = capsys.readouterr().out.splitlines()
    assert first[0] == "4 runs, 0 done; how long they take is known when the first one ends"
    ended = r"\[1/4\] max_staleness_0-seed1: done in \d s; less than a minute left"
    assert any(re.fullmatch(ended, line) for line in first)
    sweep = read(file)
    (sweep.folder / "seconds.json").write_text('{"max_staleness_0-seed1": 60, "max_staleness_0-seed2": 120}')
    assert runner.seconds_left(sweep, sweep.jobs()) == 90  # max_staleness_2 takes as long as the others
    (sweep.folder / "seconds.json").write_text('{"max_staleness_0-seed1": 60, "max_staleness_2-seed1": 300}')
    assert runner.to_do(sweep, sweep.jobs()) == "4 runs, 3 done; about 5 minutes by the time of the finished ones"
    command.main(file, [], Trained(), part="results")
    assert capsys.readouterr().out.startswith("4 runs, 3 done; about 5 minutes")


def test_a_begun_run_has_the_share_of_its_steps_left(make_sweep):
    sweep = read(file := make_sweep(seeds=[1, 2]))
    run(file, Trained())
    (sweep.folder / "seconds.json").write_text('{"base-seed1": 90}')
    metrics = sweep.jobs()[1].config.run_folder / "metrics.jsonl"
    metrics.write_text(json.dumps(row(1)) + "\n")
    assert runner.seconds_left(sweep, sweep.jobs()) == pytest.approx(60)  # two of three steps


def test_a_run_that_was_gone_on_with_is_not_timed(make_sweep):
    sweep = read(file := make_sweep(seeds=[1]))
    run(file, Trained())
    assert json.loads((sweep.folder / "seconds.json").read_text()).keys() == {"base-seed1"}
    (sweep.folder / "seconds.json").unlink()
    metrics = sweep.jobs()[0].config.run_folder / "metrics.jsonl"
    metrics.write_text(json.dumps(row(1)) + "\n")
    assert run(file, Trained()) == []
    assert not (sweep.folder / "seconds.json").exists()


def test_one_seed_has_no_interval_and_the_table_says_so(make_sweep):
    sweep = read(file := make_sweep(seeds=[1]))
    run(file, Trained())
    text = markdown(sweep, collect(sweep, sweep.jobs()))
    assert "one seed, so that no figure has an interval: a difference may be chance" in text
    assert "±" not in text.splitlines()[2]


def test_results_alone_start_nothing_and_name_the_runs_that_are_missing(make_sweep, capsys):
    assert command.main(make_sweep(seeds=[1]), [], trained := Trained(), part="results") == 1
    assert trained.runs == []
    assert "base, seed 1: not in the figures, 0 steps done" in capsys.readouterr().out


def test_the_printed_jobs_are_commands_that_give_the_same_configurations(make_sweep, capsys):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]}, seeds=[1, 2])
    assert cli.main(["sweep", str(file), "--print-jobs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, job in zip(lines, read(file).jobs(), strict=True):
        program, train, base, *overrides = line.split()
        assert (program, train) == ("streamrl", "train")
        assert config_file.load(Path(base), overrides) == job.config


def test_runs_share_servers_exactly_where_the_servers_would_be_started_alike():
    def kind(**tree: object) -> str | None:
        return server_kind(Config.model_validate(tree))

    assert kind() == kind(run={"seed": 9}, replay={"max_staleness": 8}, algo={"weight": "none"})
    assert kind() != kind(generate={"server_args": {"max_running_requests": 4}})
    assert kind() != kind(generate={"threads": 2})
    assert kind() != kind(generate={"workers": 2}) == kind(generate={"servers": 2})
    assert kind() != kind(model={"path": "models/other"})
    assert kind() != kind(learner={"freeze_vision": True})  # they keep the features of images
    assert kind(generate={"attach": ["http://127.0.0.1:1"]}) is None
    assert kind(learner={"lora": {"rank": 4, "publish": "adapter"}}) is None


@pytest.mark.parametrize(
    ("mean", "half_width", "text"),
    [
        (0.9123, 0.0314, "0.91 ± 0.03"),
        (0.9123, 0.0119, "0.912 ± 0.012"),
        (682.04, 1.93, "682.0 ± 1.9"),
        (479.2, 357.0, "479 ± 357"),
        (1.2e-8, 3e-9, "1.2e-08 ± 3e-09"),
        (1.0, 1e-14, "1"),
        (0.9123, None, "0.912"),
    ],
)
def test_a_figure_has_the_digits_that_its_interval_allows(mean, half_width, text):
    assert str(Estimate(mean, half_width, 3)) == text


def test_students_quantiles_are_those_of_its_distribution():
    random = np.random.default_rng(0)
    for freedom in (2, 9, 40):
        drawn = random.standard_t(freedom, 2_000_000)
        assert np.mean(np.abs(drawn) <= student_t(freedom)) == pytest.approx(0.95, abs=6e-4)


def test_the_interval_over_seeds_covers_the_truth_in_95_percent_of_all_sweeps():
    random = np.random.default_rng(1)
    hits = [abs(found.mean) <= found.half_width for found in map(estimate, random.normal(size=(4000, 3)).tolist())]
    assert np.mean(hits) == pytest.approx(0.95, abs=0.012)


def test_figures_leave_out_what_was_not_finite_and_rates_the_warm_up():
    rows = [row(step) for step in range(1, 21)]
    rows[0] |= {"time/step": 1000.0}
    rows[19] |= {"offpolicy/kl": None}
    rows[5] |= {"staleness/mean": 3.0, "tokens/trained": 300}
    found = figures(rows)
    assert found["reward"] == pytest.approx(0.1 + 0.195)
    assert found["trained"] == pytest.approx((17 * 100 + 200) / (17 * 2))
    assert found["KL"] == pytest.approx(0.01)
    assert found["staleness"] == pytest.approx((19 * 100 + 3 * 300) / 2200)
    assert found["oldest"] == 2
    assert sum(staleness_shares(rows).values()) == pytest.approx(1)


def test_clipped_is_what_lost_its_gradient_on_either_side_and_is_left_out_where_a_loss_clips_nothing():
    clips = {"loss/clip_low": 0.1, "loss/clip_high": 0.05, "loss/clip_dual": 0.01}
    rows = [row(step, **clips) for step in range(1, 11)]
    assert figures(rows)["clipped"] == pytest.approx(0.16)
    rows[3] |= {"loss/clip_high": None}  # not finite
    rows[4] |= {"loss/clip_high": 0.14}
    assert figures(rows)["clipped"] == pytest.approx(0.17)
    assert "clipped" not in figures([row(step) for step in range(1, 11)])


def test_kl_per_step_is_the_kl_over_the_age_and_left_out_where_nothing_is_stale():
    assert figures([row(step, **{"staleness/mean": 4.0}) for step in (1, 2)])["KL per step"] == pytest.approx(0.0025)
    assert "KL per step" not in figures([row(step, **{"staleness/mean": 0.0}) for step in (1, 2)])


def test_reward_curves_have_the_same_rewards_at_steps_tokens_and_seconds():
    curves = reward_curves([row(1, **{"time/step": 60.0}), row(2), row(3)])
    assert curves["steps"][0] == [1, 2, 3]
    assert curves["tokens"][0] == [100, 200, 300]
    assert curves["seconds"][0] == [0, 2, 4]  # the start of the servers is in nobody's curve
    assert curves["tokens"][1] == pytest.approx([0.11, 0.115, 0.12])


def test_a_band_is_over_all_seeds_at_every_place_and_ends_where_the_first_of_them_ends():
    curve = band([([0.0, 10.0], [0.0, 10.0]), ([0.0, 5.0], [2.0, 7.0])], points=6)
    assert curve.places.tolist() == [0, 1, 2, 3, 4, 5]
    assert curve.mean == pytest.approx([1, 2, 3, 4, 5, 6])
    assert curve.high - curve.mean == pytest.approx([12.7062 * math.sqrt(2) / math.sqrt(2)] * 6)

"""`streamrl sweep FILE`: what a file means, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from streamrl import cli
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.sweep.plan import override, read
from streamrl.lab.sweep.servers import server_kind
from tests.lab.sweep_runs import MakeSweep, sweep_maker

EXPERIMENTS = sorted(Path("configs/experiments").glob("*.yaml"))


@pytest.fixture
def make_sweep(tmp_path: Path, model_folders: tuple[Path, Path]) -> MakeSweep:
    return sweep_maker(tmp_path, model_folders[0])


@pytest.mark.parametrize("file", EXPERIMENTS, ids=lambda file: file.stem)
def test_every_experiment_expands_and_every_point_is_a_valid_configuration_with_several_seeds(file):
    sweep = read(file)
    jobs = sweep.jobs(fresh=True)  # whatever was run here before
    assert len(jobs) == len(sweep.points) * len(sweep.seeds)
    assert len(sweep.seeds) >= 3
    assert len({job.name for job in jobs}) == len(jobs)
    sets = {"scoring": 4, "dither": 2}  # of servers: two dtypes, in the former with and without a cut of long batches
    assert len({server_kind(job.config) for job in jobs}) == sets.get(file.stem, 1)


def test_there_is_an_experiment_of_each_kind():
    names = {file.stem for file in EXPERIMENTS}
    of_staleness = {"corrections", "corrections_pretrained", "freshness", "reuse", "staleness"}
    others = {"dither", "group_size", "interruption", "mixed_ages", "order", "publish_interval", "scoring"}
    assert names == others | of_staleness


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
        ({"columns": ["reward", "rewards"]}, "columns: 'rewards' is no figure; allowed: reward, reward over the run, "),
        (
            {"columns": ["reward", "reward"]},
            "columns: ['reward', 'reward'] is not allowed; allowed: a list of different",
        ),
        ({"columns": "reward"}, "columns: 'reward' is not allowed; allowed: a list of different figures"),
        ({"columns": [["reward"], 3]}, "columns: ['reward'] is no figure"),
        ({"columns": []}, "columns: [] is not allowed; allowed: a list of different figures"),
        ({"ratios": ["KL", "rewards"]}, "ratios: 'rewards' is no figure; allowed: reward, reward over the run, "),
        ({"minutes": 0}, "minutes: 0 is not allowed; allowed: minutes of a run, a number > 0"),
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
        ({"set": {"run": {"seed": 3}}}, "run.seed: the sweep gives it to each run"),
        ({"grid": {"run": [{"steps": 5}, {"name": "x"}]}}, "run.name: the sweep gives it to each run"),
        ({"set": {"algo.kl": 0.1}, "grid": {"algo.kl": [0.1, 0.2]}}, "set: algo.kl is swept over"),
        (
            {"set": {"replay.groups_per_step": 4}, "points": [{"name": "a", "replay": {"max_staleness": 1}}]},
            "set: replay is swept over",
        ),
        (
            {"points": [{"name": "a", "algo": {"eps_high": 0.3}}], "grid": {"algo.eps_low": [0.1]}},
            "points: algo is in `grid` as well; allowed: in one of them",
        ),
        ({"name": "a/b"}, "name: 'a/b' is no folder name"),
    ],
)
def test_a_sweep_file_that_does_not_fit_is_refused_with_one_line(make_sweep, capsys, tree, line):
    assert cli.main(["sweep", str(make_sweep(**tree))]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("word", ["run.seed=7", "run.name=mine", "run.folder=elsewhere", "run={seed: 7}"])
def test_what_the_sweep_gives_to_each_run_is_refused_on_the_command_line_too(make_sweep, capsys, word):
    assert cli.main(["sweep", str(make_sweep()), word]) == 2
    assert (
        f"{'run.seed' if '{' in word else word.partition('=')[0]}: the sweep gives it to each run"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("part", [[], ["--print-jobs"], ["--results"]])
def test_epochs_in_place_of_steps_are_refused_whatever_is_asked_of_the_sweep(make_sweep, capsys, part):
    assert cli.main(["sweep", str(make_sweep()), *part, "run.epochs=2", "run.steps=null"]) == 2
    assert "point base: run.epochs: 2 in a sweep; allowed: run.steps" in capsys.readouterr().err


def test_the_printed_jobs_are_commands_that_give_the_same_configurations(make_sweep, capsys):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]}, seeds=[1, 2])
    assert cli.main(["sweep", str(file), "--print-jobs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, job in zip(lines, read(file).jobs(), strict=True):
        program, train, base, *overrides = line.split()
        assert (program, train) == ("streamrl", "train")
        assert config_file.load(Path(base), overrides) == job.config

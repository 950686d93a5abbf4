"""`streamrl sweep`: what the seeds add up to."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from streamrl.lab.sweep import command, plots
from streamrl.lab.sweep.differences import bootstrap, difference, ratio
from streamrl.lab.sweep.estimates import Estimate, band, estimate, student_t
from streamrl.lab.sweep.figures import figures, reward_curves, staleness_shares, sum_to
from streamrl.lab.sweep.plan import read
from streamrl.lab.sweep.results import collect, markdown
from tests.lab.sweep_runs import MakeSweep, Trained, row, run, sweep_maker


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "draw", lambda *_: [])


@pytest.fixture
def make_sweep(tmp_path: Path, model_folders: tuple[Path, Path]) -> MakeSweep:
    return sweep_maker(tmp_path, model_folders[0])


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


@pytest.mark.usefixtures("without_pictures")
def test_a_sweep_chooses_the_figures_of_its_tables(make_sweep, tmp_path, capsys):
    file = make_sweep(grid={"replay.max_staleness": [0, 2]}, columns=["seconds", "reward"], seeds=[1])
    assert command.main(file, [], Trained()) == 0
    text = (tmp_path / "sweeps" / "mine" / "results.md").read_text()
    assert text.startswith("| point | seeds | seconds, s | reward |\n")
    results = json.loads((tmp_path / "sweeps" / "mine" / "results.json").read_text())
    assert results["columns"] == ["seconds", "reward"]
    assert "reward over the run" in results["points"][0]["runs"]["1"]  # all figures are kept
    assert "staleness" not in capsys.readouterr().out.replace("max_staleness", "").replace("staleness.svg", "")


@pytest.mark.usefixtures("without_pictures")
def test_results_that_cannot_be_written_are_shown_and_the_reason_told(make_sweep, tmp_path, capsys):
    file = make_sweep(seeds=[1])
    assert command.main(file, [], Trained()) == 0
    results = tmp_path / "sweeps" / "mine" / "results.json"
    results.unlink()
    results.mkdir()
    capsys.readouterr()
    assert command.main(file, [], Trained(), part="results") == 1
    out, err = capsys.readouterr()
    assert "over the run" in out
    assert err == f"streamrl: {results.parent}: its results are not written: Is a directory\n"


@pytest.mark.usefixtures("without_pictures")
def test_a_figure_may_be_compared_by_its_ratio_without_a_target(make_sweep, tmp_path):
    points = [{"name": "first", "run.steps": 3}, {"name": "second", "run.steps": 5}]
    assert command.main(make_sweep(points=points, ratios=["reward"], seeds=[1, 2]), [], Trained()) == 0
    text = (tmp_path / "sweeps" / "mine" / "results.md").read_text()
    assert "| point | pairs | reward | Student | bootstrap |\n" in text
    assert "ratio to first with the same seed: geometric mean over the seeds, the ends of" in text


@pytest.mark.usefixtures("without_pictures")
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


@pytest.mark.usefixtures("without_pictures")
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


@pytest.mark.usefixtures("without_pictures")
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
    ratios = next(line for line in text.splitlines() if line.startswith("| second | 3 | 1.00"))
    assert ratios.startswith("| second | 3 | 1.00 (2/3) | 1.00 .. 1.00 | 1.00 .. 1.00 |")
    assert "ratio to first with the same seed: geometric mean over the seeds, where both reach a reward of 0.16" in text


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


@pytest.mark.parametrize(
    ("mean", "half_width", "text"),
    [
        (0.9123, 0.0314, "0.91 ± 0.03"),
        (0.9123, 0.0119, "0.912 ± 0.012"),
        (682.04, 1.93, "682.0 ± 1.9"),
        (479.2, 357.0, "479 ± 357"),
        (1.2e-8, 3e-9, "1.2e-08 ± 3e-09"),
        (1.2344e-3, 4e-6, "1.234e-03 ± 4e-06"),
        (1.2344e-3, 1.4e-7, "1.23440e-03 ± 1.4e-07"),
        (1e-8, 4e-6, "1e-08 ± 4e-06"),
        (999.7, 0.0, "1000"),
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


def test_no_rate_has_the_first_steps_of_a_start_of_the_run():
    rows = [row(step) | {"version": f"{step}.{int(step > 10)}"} for step in range(1, 21)]
    rows[10] |= {"time/step": 90.0}  # the servers start again
    assert figures(rows)["trained"] == pytest.approx(50)
    assert figures(rows[:3])["trained"] == pytest.approx(50)


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


def test_a_step_without_rewards_is_in_the_tokens_and_seconds_of_the_later_ones():
    curves = reward_curves([row(1), row(2, **{"reward/mean": None}), row(3)])
    assert curves["steps"][0] == [1, 3]
    assert curves["tokens"][0] == [100, 300]
    assert curves["seconds"][0] == [0, 4]
    assert len(curves["seconds"][1]) == 2


def test_a_band_is_over_all_seeds_at_every_place_and_ends_where_the_first_of_them_ends():
    curve = band([([0.0, 10.0], [0.0, 10.0]), ([0.0, 5.0], [2.0, 7.0])], points=6)
    assert curve.places.tolist() == [0, 1, 2, 3, 4, 5]
    assert curve.mean == pytest.approx([1, 2, 3, 4, 5, 6])
    assert curve.high - curve.mean == pytest.approx([12.7062 * math.sqrt(2) / math.sqrt(2)] * 6)

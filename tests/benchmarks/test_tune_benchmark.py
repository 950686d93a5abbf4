"""The grid that judges `streamrl tune`, what is kept of it, and its verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.tune import DRAWN
from benchmarks.tune_grid import Kept, best, grid, verdict
from streamrl.config import file as config_file
from streamrl.lab.tune.runs import MICRO_BATCH


def test_the_grid_has_at_least_twelve_settings_that_can_run_on_both_configurations(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.yaml"
    drawn.write_text(yaml.safe_dump(DRAWN))
    for path in (Path("configs/long_answers.yaml"), drawn):
        settings = grid(config_file.load(path))
        assert len(set(settings)) == len(settings) >= 12
        for each in settings:
            config_file.load(path, each)


def test_what_was_measured_is_kept_and_not_taken_for_another_run(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "measured.jsonl")
    kept.add("a", ("x=1",), 0, 30, (10.0, 0.5))
    again = Kept(tmp_path / "measured.jsonl")
    assert again.get("a", ("x=1",), 0, 30) == (10.0, 0.5)
    assert [again.get(*key) for key in (("b", ("x=1",), 0, 30), ("a", (), 0, 30), ("a", ("x=1",), 1, 30))] == [None] * 3
    for round_, steps, age in ((1, 30, 1.0), (2, 30, 2.0), (1, 6, 9.0)):
        again.add("a", ("x=1",), round_, steps, (10.0, age))
    assert again.ages("a", ("x=1",), 30) == [0.5, 1.0, 2.0]
    assert again.ages("a", ("x=2",), 30) == []


def test_the_grid_has_the_choices_micro_batch_too_where_it_has_another() -> None:
    config = config_file.load(Path("configs/long_answers.yaml"))
    settings, other = grid(config), f"{MICRO_BATCH}=64"
    assert grid(config, ("replay.max_staleness=2",)) == settings
    assert grid(config, (other, "publish.every=2")) == [*settings, *((*each, other) for each in settings)]


def test_the_best_have_the_largest_medians() -> None:
    rates = {("lucky once",): [9.0, 1.0, 1.0], ("steady",): [2.0, 2.0, 2.0], ("slow",): [0.5]}
    assert best(rates, 2) == [("steady",), ("lucky once",)]


def test_an_interrupted_write_costs_its_own_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    Kept(path).add("a", ("x=1",), 1, 30, (100.0, 2.0))
    with path.open("a") as file:
        file.write('{"name": "a", "over')
    kept = Kept(path)
    assert kept.get("a", ("x=1",), 1, 30) == (100.0, 2.0)
    kept.add("a", ("x=1",), 2, 30, (110.0, 2.0))
    assert Kept(path).get("a", ("x=1",), 2, 30) == (110.0, 2.0)


def test_a_choice_is_judged_against_the_best_median() -> None:
    rates = {("slow",): [50.0, 60.0, 55.0], ("fast",): [100.0, 110.0, 90.0]}
    judged = verdict([95.0, 104.5, 85.5], rates)
    assert judged.best == ("fast",)
    for found in (judged.of_medians, judged.in_rounds):
        assert found.value == pytest.approx(0.95)
        assert found.low <= found.value <= found.high
        assert found.low == pytest.approx(0.95)  # each round has the same ratio: the machine's own drift is in none


def test_a_machine_that_was_faster_for_a_while_moves_the_medians_and_not_the_ratios_of_rounds() -> None:
    judged = verdict([50.0, 52.0, 98.0, 97.0], {("theirs",): [50.0, 66.0, 82.0, 98.0]})
    assert judged.of_medians.value == pytest.approx(74.5 / 74)
    assert judged.least == judged.in_rounds.value == pytest.approx((1.0 + 97 / 98) / 2)

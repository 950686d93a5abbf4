"""docs/figures.md and README.md say what the kept measurements say, and these hold their bars."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import stored_figures
from benchmarks.optimum import JUDGED, SHARED, SYNC, missed, ratios
from benchmarks.stored_figures import (
    MAKERS,
    PAGE,
    circle,
    in_words,
    of_peers,
    of_tune,
    read_kept,
    shown,
    to_float32,
    written,
)
from benchmarks.tune import BAR, BEST, NAMES, joined
from benchmarks.tune_grid import judged

README = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())

KEPT = read_kept()
IN_FILES = {file.stem for file in stored_figures.KEPT.glob("*.json")}


def test_the_page_is_as_measured() -> None:
    page = PAGE.read_text()
    assert written(page, KEPT) == page, "python -m benchmarks.stored_figures writes it"


def test_what_is_kept_is_on_the_page_and_what_is_not_is_not() -> None:
    named = shown(PAGE.read_text())
    assert len(named) == len(set(named))
    assert IN_FILES <= set(named) <= MAKERS.keys() & KEPT.keys()


def test_the_circle_holds_its_bars_and_the_readme_has_it() -> None:
    found = circle(KEPT["end_to_end"])
    assert not missed(found)
    paired = ratios(found)
    optimum, sync, shared = (
        f"{statistics.median(paired[f'{JUDGED} of {other}']):.2f}" for other in ("the optimum", SYNC.name, SHARED.name)
    )
    assert f"{shared} times the trained tokens/s with both cores in turn, {sync} with one each | {optimum} of" in README


def test_tickets_just_in_time_hold_their_bars() -> None:
    assert KEPT["release"]["broken"] == []


def test_the_readme_has_the_small_steps_in_bfloat16() -> None:
    runs = {point["name"]: point["runs"] for point in KEPT["dither"]["points"]}
    seconds, tokens = (to_float32(runs, "bfloat16", f"{what} to target") for what in ("seconds", "tokens"))
    copied = to_float32(runs, "bfloat16-copied", "tokens to target")
    figure = f"{seconds} of float32's seconds to a reward, {tokens} of its tokens"
    assert f"| {figure} | undithered {copied} of its tokens |" in README


def test_a_tuned_choice_holds_its_bar_in_each_configuration_or_the_page_says_that_none_is_measured() -> None:
    if "tune" not in IN_FILES:
        assert "`python -m benchmarks.tune`: not measured in its present form." in PAGE.read_text()
        return
    rows = KEPT["tune"]["rows"]
    assert len(rows) >= 2
    assert [row["name"] for row in rows] == [name for name in NAMES if name in {row["name"] for row in rows}]
    for row in rows:
        assert len({tuple(each["overrides"]) for each in row["grid"]}) >= 12
        assert len(row["turns"]) >= BEST
        assert {len(each["rates"]) for each in row["turns"]} == {len(row["turns"][0]["rates"])}
        assert judged(row)[1].least >= BAR


def tuned_row(name: str, choice: list[float]) -> dict[str, Any]:
    chosen, other = ["replay.max_staleness=1"], ["replay.max_staleness=4", "generate.groups_in_flight=40"]
    turns = [
        {"overrides": chosen, "rates": choice, "age": 0.9},
        {"overrides": other, "rates": [100.0, 110.0, 90.0], "age": 3.5},
    ]
    predicted = {"rate": 101.4, "age": 0.95}
    return {"name": name, "machine": "a CPU, 2 cores", "choice": chosen, "predicted": predicted, "grid": turns} | {
        "turns": turns
    }


def test_a_tuned_choice_is_told_beside_what_took_turns_with_it() -> None:
    found = "".join(of_tune({"rows": [tuned_row("long-answers", [95.0, 104.5, 85.5])]})).splitlines()
    assert found[2] == "| the choice: bound 1 | 95 (86..104) | 0.90 | 1 | 1 |"
    assert found[3].startswith("| bound 4, 40 groups in flight | 100 (90..110) | 3.50 | 0.950 (0.950..0.950) | 0.950")
    assert found[5].startswith(
        "2 settings, then 3 rounds, on a CPU, 2 cores; of the choice 101 tokens/s and an age of 0.95"
    )


def test_configurations_that_are_measured_by_themselves_are_kept_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    short, long = tuned_row("short-answers", [90.0] * 3), tuned_row("long-answers", [80.0] * 3)
    assert joined(path, [short]) == [short]
    path.write_text(json.dumps({"quick": True, "rows": [short]}))
    assert joined(path, [long]) == [long]
    path.write_text(json.dumps({"quick": False, "rows": [short]}))
    assert joined(path, [long]) == [long, short]
    again = tuned_row("short-answers", [99.0] * 3)
    assert joined(path, [again]) == [again]


def test_a_setting_is_told_in_words() -> None:
    window = ("replay.max_staleness=2", "replay.window=8", "replay.order=windowed", "generate.groups_in_flight=8")
    assert in_words(window) == "bound 2, windows of 8 groups, 8 groups in flight"
    assert in_words(()) == "as configured"


def run(tokens_per_s: float, to_reward: float | None, ended: float) -> dict[str, Any]:
    return {
        "tokens_per_s": tokens_per_s,
        "to_reward": to_reward,
        "steps_to_reward": None if to_reward is None else 12,
        "first_step": 30.0,
        "waiting": 0.25,
        "length": 5.5,
        "ended": ended,
    }


def measured_peers(target: float | None = 0.4) -> dict[str, Any]:
    repeats = [
        {"streamrl, float32": run(60.0 + seed, 100.0, 100.0), "TRL, float32": run(30.0, reached, 300.0)}
        for seed, reached in ((1, 200.0), (2, None), (3, 250.0))
    ]
    return {"target": target, "steps": 32, "machine": "a CPU, 2 cores", "repeats": repeats}


def test_a_run_that_ended_before_the_reward_is_told_beside_trl() -> None:
    found = "".join(of_peers(measured_peers())).splitlines()
    assert found[0] == "| | tokens/s | s to reward 0.4 | steps | waiting | tokens of an answer |"
    assert found[2].startswith("| streamrl, float32 | 62.0 (61.0..63.0) | 100 (100..100) | 12 (12..12) |")
    assert found[3].startswith("| TRL, float32 | 30.0 (30.0..30.0) | 250 (200..>300) | 12 (12..>32) |")
    assert "| float32: times sooner at the reward | 2.50 (2.00..>3.00) |" in found
    assert found[-1] == "3 repeats, until reward 0.4, or 32 steps, on a CPU, 2 cores."


def test_long_answers_have_no_reward_beside_trl() -> None:
    unrewarded = measured_peers(None)
    for each in unrewarded["repeats"]:
        for one in each.values():
            one.update(to_reward=None, steps_to_reward=None)
    found = "".join(of_peers(unrewarded)).splitlines()
    assert found[0] == "| | tokens/s | waiting | tokens of an answer |"
    assert "reward" not in "".join(found)


def test_the_command_writes_the_page_and_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, now = tmp_path / "figures.md", PAGE.read_text()
    page.write_text(now.replace("| sync |", "| another |"))
    monkeypatch.setattr(stored_figures, "PAGE", page)

    def command(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["stored_figures", *arguments])
        return stored_figures.main()

    assert command("--check") == 1
    assert "not as measured" in capsys.readouterr().out
    assert command() == 0
    assert page.read_text() == now
    assert command("--check") == 0
    page.write_text("<!-- nothing figures: from benchmarks/results -->\n<!-- end of nothing figures -->\n")
    assert command() == 1
    assert "nothing: not kept" in capsys.readouterr().out

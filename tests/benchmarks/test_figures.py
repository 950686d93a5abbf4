"""docs/figures.md, README.md, docs/comparison.md: tables whose measurements are kept say what these say."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import release, repeats
from benchmarks.optimum import JUDGED, SHARED, SYNC, Repeat, Run, all_sides, missed, of_medians, ratios, spread
from benchmarks.stored_sweeps import read_stored
from streamrl.lab.sweep.differences import ratio

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "benchmarks" / "results" / "figures"

Rows = list[list[str]]


def kept(name: str) -> dict[str, Any]:
    """What `python -m benchmarks.NAME --json` has written."""
    return json.loads((KEPT / f"{name}.json").read_text())


def section(heading: str) -> str:
    """The text of docs/figures.md under a heading."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", (ROOT / "docs" / "figures.md").read_text(), re.M | re.S)
    return text


def table(text: str) -> Rows:
    """The cells of its rows, but for the heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def in_page(values: Sequence[float], form: str = ".2f") -> str:
    return spread(values, form).replace(" .. ", "..")


@pytest.fixture(scope="module")
def circle() -> list[Repeat]:
    return [
        Repeat(
            generation=tuple(each["generation"]),
            training=tuple(each["training"]),
            runs={name: Run(**run) for name, run in each["runs"].items()},
        )
        for each in kept("end_to_end")["repeats"]
    ]


def circle_rows(circle: Sequence[Repeat]) -> Iterator[list[str]]:
    paired, medians = ratios(circle), of_medians(circle)
    for name in circle[0].runs:
        runs = [repeat.runs[name] for repeat in circle]
        middle = {key: statistics.median(getattr(run, key) for run in runs) for key in Run.__slots__}
        compared = [f"{name} of {other}" for other in ("the optimum", SYNC.name, SHARED.name)]
        yield [
            name,
            in_page([run.tokens_per_s for run in runs], ".0f"),
            *(in_page(paired[each]) if each in paired else "1" for each in compared),
            ", ".join(f"{medians[each]:.2f}" if each in medians else "1" for each in compared),
            f"{middle['staleness_mean']:.2f}, {middle['staleness_p95']:.0f}",
            f"{middle['idle_learner']:.0%}, {middle['idle_generator']:.0%}",
        ]


def test_the_circle_is_as_measured(circle: list[Repeat]) -> None:
    text = section("The whole circle")
    assert table(text) == list(circle_rows(circle))
    sides = [[speed for repeat in circle for speed in getattr(repeat, side)] for side in ("generation", "training")]
    generation, training = (in_page(values, ".0f") for values in sides)
    words = " ".join(text.split())
    assert f"generation alone {generation}, training alone {training} tokens/s" in words
    assert f"has {all_sides(circle).ceiling:.2f} times in turn at the most" in words
    assert "both reached" in words
    assert not missed(circle)


def test_the_circle_is_the_same_on_every_page(circle: list[Repeat]) -> None:
    paired = ratios(circle)
    optimum, sync, shared = (
        f"{statistics.median(paired[f'{JUDGED} of {other}']):.2f}" for other in ("the optimum", SYNC.name, SHARED.name)
    )
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"{shared} times the trained tokens/s with both cores in turn, {sync} with one each | {optimum} of" in readme


def release_rows(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for fields in rows:
        row = release.Row(**{**fields, "courses": tuple(release.Course(**each) for each in fields["courses"])})
        first = row.policy == release.POLICIES[0]
        yield [
            row.load,
            row.policy,
            "1" if first else f"{statistics.median(row.ratios):.3f} ({repeats.spread(row.ratios):.1%})",
            "1" if first else f"{statistics.median(row.ratios_all):.3f}",
            f"{row.middle('mean_age'):.2f}",
            f"{row.middle('p95_age'):.0f}",
            f"{row.middle('mean_age_all'):.2f}",
            f"{row.middle('waiting'):.1%}",
        ]


def test_tickets_just_in_time_are_as_measured() -> None:
    found = kept("release")
    assert table(section("Tickets just in time")) == list(release_rows(found["rows"]))
    assert found["broken"] == []


def test_small_steps_in_bfloat16_are_as_the_stored_sweep_has_them() -> None:
    points = {point["name"]: point["runs"] for point in read_stored()["dither"]["points"]}

    def to_float32(name: str, figure: str) -> list[str]:
        found = [
            {int(seed): run[figure] for seed, run in points[point].items() if figure in run}
            for point in (name, "float32")
        ]
        mean, ends = ratio(*found).cells()[:2]
        return [mean, f"{mean} ({ends.replace(' .. ', '..')})"]

    cells = {
        name: [to_float32(name, figure) for figure in ("seconds to target", "tokens to target")]
        for name in ("bfloat16", "bfloat16-copied")
    }
    assert [row[1:] for row in table(section("Small steps in bfloat16"))] == [
        [whole for _, whole in each] for each in cells.values()
    ]
    (seconds, _), (tokens, _) = cells["bfloat16"]
    readme = " ".join((ROOT / "README.md").read_text().split())
    copied = cells["bfloat16-copied"][1][0]
    assert f"| {seconds} of float32's seconds to a reward | {tokens} of its tokens; {copied} undithered |" in readme

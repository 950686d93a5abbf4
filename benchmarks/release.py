"""Tickets at once and just in time (`replay.release`): how old the data becomes, and what of the speed stays.

    python -m benchmarks.release [--quick] [--json PATH]

    slow learner      a step takes SLOW times as long as its groups take to be generated
    balanced          both take as long
    slow generation   a step takes 1/SLOW as long

The replay service is the real one, with its journal; engines and learner are those of `benchmarks.pressure`, which let
time pass. Answers have log-normal lengths, the same in every run; the bound is BOUND. How fast the engines generate is
measured first, and the learner's step set by it. The policies take turns in every repeat, the first one begins in every
other; a ratio is that of two runs of one repeat, with (max - min) / median over the repeats.

Two figures have a second definition, which looks worse, and both are printed: ages and steps/s without the first steps,
in which nothing is held back yet and what was issued before is trained, and *all* with them.

Exit code 1 where slots or bound are broken, the median ratio of steps/s is below RATIO, or the mean age under a slow
learner above AGE.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.pressure_roles import Load, Slots, Trained, slots_path
from benchmarks.pressure_run import WORKERS, Run, read
from benchmarks.pressure_submission import grown
from benchmarks.repeats import spread
from streamrl.lab.output import output_file
from streamrl.replay.orders import make_order

SLOTS = 32  # of an engine: four groups of eight
LENGTHS = Load(group=0.0, step=0.01, slots=SLOTS, median=40, sigma=0.8, longest=400, token=0.002)
BOUND = 16
GROUPS = 8  # of a step
SLOW = 3.0
LOADS = {"slow learner": SLOW, "balanced": 1.0, "slow generation": 1 / SLOW}
POLICIES = ("eager", "just_in_time")
WARM_UP = 32  # steps that are not timed: what went out before is BOUND + 1 steps

RATIO = 0.97
AGE = 3.0


@dataclass(frozen=True)
class Course:
    """One run."""

    steps_per_s: float
    steps_per_s_all: float
    mean_age: float  # of the oldest token of each group, in learner steps
    p95_age: float
    largest_age: int
    mean_age_all: float
    waiting: float  # share of the time in which the learner waited
    idle: float  # share of the engines' slots in which no request ran
    charged: int  # slots in use, at most


@dataclass(frozen=True)
class Row:
    """One policy under one load, over all repeats."""

    load: str
    policy: str
    step_seconds: float
    slots: int  # N
    courses: tuple[Course, ...]
    ratios: tuple[float, ...]  # steps/s to those of the first policy in the same repeat
    ratios_all: tuple[float, ...]

    def middle(self, field: str) -> float:
        return statistics.median(vars(course)[field] for course in self.courses)

    @property
    def name(self) -> str:
        return f"{self.load}, {self.policy}"

    def promises(self) -> list[str]:
        """Those of slots, bound and age that were not kept."""
        charged = max(course.charged for course in self.courses)
        oldest = max(course.largest_age for course in self.courses)
        found = [f"{self.name}: {charged} slots in use, {self.slots} allowed"] if charged > self.slots else []
        if oldest > BOUND:
            found.append(f"{self.name}: a token {oldest} steps old, {BOUND} allowed")
        if self.policy != POLICIES[0] and LOADS[self.load] > 1 and (age := self.middle("mean_age")) > AGE:
            found.append(f"{self.name}: a mean age of {age:.2f} steps, {AGE:g} is the bar")
        return found

    def broken(self) -> list[str]:
        """Promises and bars that were not kept."""
        found = self.promises()
        if (ratio := statistics.median(self.ratios)) < RATIO:
            found.append(f"{self.name}: {ratio:.3f} of the steps/s of {POLICIES[0]}, {RATIO} is the bar")
        return found


def course(folder: Path, policy: str, load: Load, steps: int) -> tuple[int, Course]:
    """`steps` timed learner steps. Returns the slots too."""
    run = Run(
        folder,
        load,
        {
            "generate": {"groups_in_flight": SLOTS // 8},
            "replay": {"groups_per_step": GROUPS, "max_staleness": BOUND, "release": policy},
        },
    )
    record = run.go(lambda record: len(record) >= WARM_UP + steps)[: WARM_UP + steps]
    timed = record[WARM_UP:]
    begin, end = record[WARM_UP - 1].ended, timed[-1].ended
    used = sum(grown(read(slots_path(folder, index), Slots), begin, end)[0] for index in range(WORKERS))
    return make_order(run.config.replay).capacity, Course(
        steps_per_s=len(timed) / (end - begin),
        steps_per_s_all=len(record) / (record[-1].ended - record[0].asked),
        mean_age=statistics.mean(_ages(timed)),
        p95_age=float(np.percentile(_ages(timed), 95)),
        largest_age=max(_ages(record)),
        mean_age_all=statistics.mean(_ages(record)),
        waiting=sum(line.received - line.asked for line in timed) / (end - begin),
        idle=1 - used / (WORKERS * load.slots * (end - begin)),
        charged=run.slots(),
    )


def _ages(record: Sequence[Trained]) -> list[int]:
    return [age for line in record for age in line.ages]


def generation_seconds(folder: Path, steps: int) -> float:
    """That the engines need for the groups of a step: with a learner that needs almost none."""
    _, found = course(folder, POLICIES[0], LENGTHS, steps)
    return 1 / found.steps_per_s


def compare(folder: Path, repeats: int, steps: int) -> list[Row]:
    """Every load and policy in every repeat, so that what the machine does besides meets all of them."""
    alone = generation_seconds(folder / "alone", steps)
    found: dict[tuple[str, str], list[Course]] = {(load, policy): [] for load in LOADS for policy in POLICIES}
    slots = 0
    for repeat in range(repeats):
        for load, policy in list(found) if repeat % 2 == 0 else reversed(found):
            times = replace(LENGTHS, step=alone * LOADS[load])
            slots, one = course(folder / f"{load}-{policy}-{repeat}".replace(" ", "-"), policy, times, steps)
            found[load, policy].append(one)
    rows = []
    for (load, policy), courses in found.items():
        pairs = list(zip(courses, found[load, POLICIES[0]], strict=True))
        ratios = tuple(one.steps_per_s / first.steps_per_s for one, first in pairs)
        ratios_all = tuple(one.steps_per_s_all / first.steps_per_s_all for one, first in pairs)
        rows.append(Row(load, policy, alone * LOADS[load], slots, tuple(courses), ratios, ratios_all))
    return rows


def show(rows: Sequence[Row]) -> None:
    print(
        f"log-normal answers (median {LENGTHS.median:g}, sigma {LENGTHS.sigma:g}, at most {LENGTHS.longest} tokens), "
        f"{WORKERS} engines of {SLOTS} slots, bound {BOUND}; {len(rows[0].courses)} repeats\n"
        f"{'':31}step            steps/s to {POLICIES[0]}          age, learner steps      learner    slots\n"
        f"{'load':17}{'policy':14}   s   steps/s  (spread)     all   mean   p95  most   all   waits     idle"
    )
    for row in rows:
        print(
            f"{row.load:17}{row.policy:14}{row.step_seconds:4.2f}{row.middle('steps_per_s'):10.2f}"
            f"{statistics.median(row.ratios):6.3f} ({spread(row.ratios):4.1%}){statistics.median(row.ratios_all):7.3f}"
            f"{row.middle('mean_age'):7.2f}{row.middle('p95_age'):6.1f}{row.middle('largest_age'):6.0f}"
            f"{row.middle('mean_age_all'):6.2f}{row.middle('waiting'):8.1%}{row.middle('idle'):9.0%}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each once and shortly; speeds are not judged")
    parser.add_argument("--repeats", type=int, default=5, help="of every load and policy")
    parser.add_argument("--steps", type=int, help="that are timed of one run (default: 24, quick: 8)")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        repeats = 1 if options.quick else options.repeats
        rows = compare(Path(name), repeats, options.steps or (8 if options.quick else 24))
    show(rows)
    broken = [line for row in rows for line in (row.promises() if options.quick else row.broken())]
    print("\nbroken: " + ("; ".join(broken) or "nothing"))
    if options.json:
        figures = {"rows": [asdict(row) for row in rows], "broken": broken, "ratios": _ratios(rows)}
        options.json.write_text(json.dumps({"benchmark": "release", **figures}, indent=1) + "\n")
    return 1 if broken else 0


def _ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For `benchmarks.suite`: speeds, and how many times younger."""
    found = []
    for first, row in zip(rows[::2], rows[1::2], strict=True):
        younger = [a.mean_age / max(0.01, b.mean_age) for a, b in zip(first.courses, row.courses, strict=True)]
        for name, values in ((f"steps/s, {row.load}", row.ratios), (f"younger, {row.load}", younger)):
            found.append({"name": name, "median": statistics.median(values), "low": min(values), "high": max(values)})
    return found


if __name__ == "__main__":
    raise SystemExit(main())

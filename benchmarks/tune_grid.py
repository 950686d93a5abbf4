"""What `benchmarks/tune.py` measures, what it keeps of it, and its verdict: without a process."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kept import keep, read_kept
from streamrl.config import Config
from streamrl.lab.tune.runs import MICRO_BATCH

BOUNDS = (0, 1, 2, 4)
SHARES = (0.25, 0.5, 1.0)  # of the slots of a bound that are in flight

RESAMPLES = 2000  # of the rounds, for the interval of a ratio of medians

Overrides = tuple[str, ...]


def grid(config: Config, choice: Overrides = ()) -> list[Overrides]:
    """Fourteen settings: four bounds with three numbers in flight each, a window, and a longer publish interval.

    Where the choice has another micro batch, all of them once more with that.
    """
    step = config.replay.groups_per_step
    points: list[Overrides] = [
        (f"replay.max_staleness={bound}", f"generate.groups_in_flight={max(1, round(share * (bound + 1) * step))}")
        for bound in BOUNDS
        for share in SHARES
    ]
    window = ("replay.max_staleness=2", f"replay.window={step}", "replay.order=windowed")
    points += [(*window, f"generate.groups_in_flight={step}"), (*points[-2], "publish.every=2")]
    others = [each for each in choice if each.startswith(f"{MICRO_BATCH}=")]
    return [*points, *((*point, each) for each in others for point in points)]


def best(rates: Mapping[Overrides, Sequence[float]], count: int) -> list[Overrides]:
    """Those with the largest medians, the fastest first.

    >>> best({("a=1",): [3.0], ("a=2",): [9.0, 1.0, 2.0], ("a=3",): [4.0]}, 2)
    [('a=3',), ('a=1',)]
    """
    return sorted(rates, key=lambda each: -statistics.median(rates[each]))[:count]


class Kept:
    """Tokens/s and mean age of each run, a line each: what is there is not measured again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = {self._key(row): (row["rate"], row["age"]) for row in read_kept(path)}

    @staticmethod
    def _key(row: Mapping[str, object]) -> str:
        return json.dumps([row["name"], row["overrides"], row["round"], row["steps"]])

    def get(self, name: str, overrides: Overrides, round_: int, steps: int) -> tuple[float, float] | None:
        """(tokens/s, mean age in learner steps)."""
        row = {"name": name, "overrides": list(overrides), "round": round_, "steps": steps}
        return self._known.get(self._key(row))

    def ages(self, name: str, overrides: Overrides, steps: int) -> list[float]:
        """Of its runs."""
        runs = ((*json.loads(key), age) for key, (_, age) in self._known.items())
        wanted = (name, list(overrides), steps)
        return [age for own, words, _, length, age in runs if (own, words, length) == wanted]

    def add(self, name: str, overrides: Overrides, round_: int, steps: int, found: tuple[float, float]) -> None:
        row = {"name": name, "overrides": list(overrides), "round": round_, "steps": steps}
        self._known[self._key(row)] = found
        keep(self._path, {**row, "rate": found[0], "age": found[1]})


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio with its 95 % interval, of the bootstrap: rounds are resampled whole."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, ratio: Callable[[Sequence[int]], float], rounds: int, seed: int = 0) -> Estimate:
        """`ratio` of the rounds with these places."""
        rng, places = random.Random(seed), range(rounds)
        drawn = sorted(ratio(rng.choices(places, k=rounds)) for _ in range(RESAMPLES))
        return cls(ratio(places), drawn[math.floor(0.025 * RESAMPLES)], drawn[math.ceil(0.975 * RESAMPLES) - 1])

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} .. {self.high:.3f})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The choice against the best of others, over rounds in which each ran once: tokens/s of it over the best's."""

    best: Overrides  # by the median
    of_medians: Estimate
    in_rounds: Estimate  # the median of the rounds' ratios: what the machine does besides meets both alike

    @property
    def least(self) -> float:
        """By the definition that looks worse."""
        return min(self.of_medians.value, self.in_rounds.value)


def verdict(choice: Sequence[float], others: Mapping[Overrides, Sequence[float]]) -> Verdict:
    """Of the choice, and of each of the others: tokens/s by round.

    >>> found = verdict([90.0, 92.0], {("a=1",): [100.0, 80.0], ("a=2",): [50.0, 60.0]})
    >>> found.best, round(found.of_medians.value, 3), round(found.in_rounds.value, 3)
    (('a=1',), 1.011, 1.025)
    """
    (first,) = best(others, 1)
    theirs = others[first]

    def of_medians(rounds: Sequence[int]) -> float:
        return statistics.median(choice[each] for each in rounds) / statistics.median(theirs[each] for each in rounds)

    def in_rounds(rounds: Sequence[int]) -> float:
        return statistics.median(choice[each] / theirs[each] for each in rounds)

    return Verdict(first, *(Estimate.of(ratio, len(choice)) for ratio in (of_medians, in_rounds)))


def judged(row: Mapping[str, Any]) -> tuple[dict[Overrides, list[float]], Verdict]:
    """Of a row of the figures: tokens/s by round of the choice and of what took turns with it; the choice's verdict."""
    rates = {tuple(each["overrides"]): each["rates"] for each in row["turns"]}
    choice = tuple(row["choice"])
    return rates, verdict(rates[choice], {each: values for each, values in rates.items() if each != choice})

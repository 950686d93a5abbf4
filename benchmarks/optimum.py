"""What the runs of `benchmarks/end_to_end.py` add up to: the optimum, ratios in two ways, the ceiling of the layout.

The optimum of a repeat is the slower of its two sides, each the median of its measurements in that repeat. A ratio is
taken in two ways:

    paired         in each repeat by itself; then the median, with the smallest and the largest
    of medians     the median tokens/s of one over that of the other, over all repeats; the optimum's is of all
                   measurements of either side

A synchronous run with a core for each side leaves one of them idle. With G and T, tokens/s of generation and of
training alone, it makes `in turn = 1 / (1/G + 1/T)` at the most, and the optimum is min(G, T): so

    ceiling = optimum / in turn = 1 + min(G, T) / max(G, T)      2 at perfect balance

is the most that any run without idle cores has against it. What a run has above comes from the synchronous run, which
is slower than in turn: its server runs empty at the end of each step.

    run / sync = (run / optimum) (optimum / in turn) (in turn / sync)
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.balanced_run import AT_ONCE, BOUND_4, SHARED, SYNC, Row

OF_THE_OPTIMUM, OF_SYNC = 0.85, 1.5  # bars, of JUDGED
JUDGED = "bound 2"
BALANCE = 0.15  # by which the two sides may differ, in seconds a token, where the bars are judged


@dataclass(frozen=True, slots=True)
class Run:
    """The counted steps of one run."""

    tokens_per_s: float
    staleness_mean: float  # learner steps, over tokens
    staleness_p95: float
    reward_per_s: float
    idle_learner: float  # share of the time
    idle_generator: float

    @classmethod
    def of(cls, rows: Sequence[Row], ages: np.ndarray) -> Run:
        """`rows`: of the counted steps and the one before; `ages` of their trained tokens, in learner steps."""
        began, rows = rows[0]["time"], rows[1:]
        tokens = min(sum(row[key] for row in rows) for key in ("tokens/trained", "tokens/generated"))
        times, rewards = ([row[key] for row in rows] for key in ("time", "reward/mean"))
        seconds = [row["time/step"] for row in rows]
        slope = np.polyfit(np.array(times) - began, rewards, 1)[0]
        return cls(
            tokens_per_s=tokens / (times[-1] - began),
            staleness_mean=float(np.mean(ages)),
            staleness_p95=float(np.percentile(ages, 95)),
            reward_per_s=float(slope),
            idle_learner=float(np.average([row["idle/learner"] for row in rows], weights=seconds)),
            idle_generator=float(np.average([row["idle/generator"] for row in rows], weights=seconds)),
        )


@dataclass(frozen=True, slots=True)
class Sides:
    """Tokens/s of either side alone.

    Example: generation 600 and training 500 have the optimum 500, 273 in turn, and the ceiling 1.83.
    """

    generation: float
    training: float

    @property
    def optimum(self) -> float:
        """Of a circle whose sides never wait for each other."""
        return min(self.generation, self.training)

    @property
    def in_turn(self) -> float:
        """Of a circle whose sides always wait for each other, each at its speed alone."""
        return 1 / (1 / self.generation + 1 / self.training)

    @property
    def ceiling(self) -> float:
        """The most that a run has against one in turn: 1 to 2."""
        return self.optimum / self.in_turn

    @property
    def imbalance(self) -> float:
        """By which share the slower side is slower."""
        return max(self.generation, self.training) / self.optimum - 1


@dataclass(frozen=True, slots=True)
class Repeat:
    """One turn of everything."""

    generation: tuple[float, ...]  # tokens/s of that side alone, of each measurement
    training: tuple[float, ...]
    runs: dict[str, Run]  # by the setting's name

    @property
    def sides(self) -> Sides:
        return Sides(statistics.median(self.generation), statistics.median(self.training))

    def of_the_optimum(self, name: str) -> float:
        return self.runs[name].tokens_per_s / self.sides.optimum

    def of(self, name: str, other: str) -> float:
        return self.runs[name].tokens_per_s / self.runs[other].tokens_per_s


def all_sides(repeats: Sequence[Repeat]) -> Sides:
    """The medians of all measurements of either side."""
    return Sides(
        statistics.median(speed for repeat in repeats for speed in repeat.generation),
        statistics.median(speed for repeat in repeats for speed in repeat.training),
    )


def speed(repeats: Sequence[Repeat], name: str) -> float:
    """The median tokens/s of a setting."""
    return statistics.median(repeat.runs[name].tokens_per_s for repeat in repeats)


def ratios(repeats: Sequence[Repeat]) -> dict[str, list[float]]:
    """The paired ones, which the bars and `make bench` look at, one value a repeat: higher is better."""
    names = list(repeats[0].runs)
    found = {f"{name} of the optimum": [repeat.of_the_optimum(name) for repeat in repeats] for name in names}
    for name, other in _pairs(names):
        found[f"{name} of {other}"] = [each.of(name, other) for each in repeats]
    return found


def of_medians(repeats: Sequence[Repeat]) -> dict[str, float]:
    """The same ratios, of medians."""
    names, optimum = list(repeats[0].runs), all_sides(repeats).optimum
    found = {f"{name} of the optimum": speed(repeats, name) / optimum for name in names}
    for name, other in _pairs(names):
        found[f"{name} of {other}"] = speed(repeats, name) / speed(repeats, other)
    return found


def parts(repeats: Sequence[Repeat], name: str) -> dict[str, float]:
    """What a setting has against sync, of medians, as a product: "run / optimum", "ceiling", "in turn / sync"."""
    sides = all_sides(repeats)
    return {
        "run / optimum": speed(repeats, name) / sides.optimum,
        "ceiling": sides.ceiling,
        "in turn / sync": sides.in_turn / speed(repeats, SYNC.name),
    }


def missed(repeats: Sequence[Repeat]) -> list[str]:
    """The bars that were not reached, by the medians of the paired ratios."""
    found = ratios(repeats)
    bars = {f"{JUDGED} of the optimum": OF_THE_OPTIMUM, f"{JUDGED} of sync": OF_SYNC}
    broken = [
        f"{name}: {statistics.median(found[name]):.2f}, at least {bar:g} is wanted"
        for name, bar in bars.items()
        if statistics.median(found[name]) < bar
    ]
    imbalance = statistics.median(repeat.sides.imbalance for repeat in repeats)
    if imbalance > BALANCE:
        broken.append(f"one side is {imbalance:.0%} slower than the other, at most {BALANCE:.0%} is balanced")
    return broken


def lines(repeats: Sequence[Repeat], name: str) -> Iterator[str]:
    """What is told below the table; `name`: the setting whose parts are told."""
    sides = all_sides(repeats)
    for side in ("generation", "training"):
        values = [speed for repeat in repeats for speed in getattr(repeat, side)]
        yield f"{side} alone: {spread(values, '.0f')} tokens/s, {len(values)} measurements"
    yield (
        f"optimum {sides.optimum:.0f} tokens/s, in turn {sides.in_turn:.0f}: sync leaves a core idle, and a run that "
        f"leaves none has {sides.ceiling:.2f} times in turn at the most (2 at perfect balance)"
    )
    found = parts(repeats, name)
    yield (
        f"{name} of sync, of medians: {of_medians(repeats)[f'{name} of {SYNC.name}']:.2f} = "
        f"{found['run / optimum']:.2f} of the optimum x {found['ceiling']:.2f}, the idle core, x "
        f"{found['in turn / sync']:.2f}, what sync is slower than in turn"
    )
    pair = f"{BOUND_4.name} of {AT_ONCE.name}"
    if pair in (paired := ratios(repeats)):
        yield f"tickets just in time, {pair}: {spread(paired[pair])}, of medians {of_medians(repeats)[pair]:.2f}"


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median, with the smallest and the largest."""
    if not values:
        return ""
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


def _pairs(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each setting with the two that all are compared with, and tickets just in time with tickets at once."""
    yield from (
        (name, each.name) for each in (SYNC, SHARED) if each.name in names for name in names if name != each.name
    )
    if {BOUND_4.name, AT_ONCE.name} <= set(names):
        yield BOUND_4.name, AT_ONCE.name

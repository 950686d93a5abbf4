"""Which settings lie on the front of tokens/s against mean age, and which of them is chosen. Pure.

    begins ─▶ simulated shortly ─▶ the front ─▶ neighbours of all that are on it or near it ─┐
                                      ▲────────── until none of these is new ────────────────┘
    all that are near the front ─▶ simulated long ─▶ the front ─▶ the choice by a rule

A point is one setting as the place of each of its values on its axis. What cannot run has no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from streamrl.lab.simulate.figures import Figures

Point = tuple[int, ...]

# What is simulated: of a point, shortly or long; None for a setting that cannot run.
Simulate = Callable[[Point, bool], Figures | None]

# A short simulation differs from a long one by as much as this share of the tokens/s: points so near may be better.
SHORT_NOISE = 0.02

# Ages, in learner steps, that differ by less are alike.
SAME_AGE = 0.02

# An older point that is faster by a smaller share than this has no place on the front.
GAIN = 0.005

# Points that are simulated long at the most, the nearest to the front.
MOST_LONG = 32

# Where the learner, or the servers, are idle for less than this share of the time, they limit the rate.
BUSY = 0.05


@dataclass(frozen=True, slots=True)
class Found:
    """A setting that was simulated."""

    point: Point
    figures: Figures


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search found."""

    front: list[Found]  # ascending age and tokens/s
    simulated: int  # settings
    complete: bool  # False: it was ended by the limit on them


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one of the front is chosen. `Rule()` takes the freshest of those that are about as fast."""

    within: float = 0.02  # share of the fastest one's tokens/s that may be given up for fresher data
    mean_age: float | None = None  # learner steps that trained tokens may be old on average

    def __str__(self) -> str:
        limited = "" if self.mean_age is None else f" with a mean age up to {self.mean_age:g}"
        return f"the freshest within {100 * self.within:g} % of the fastest{limited}"


def search(sizes: Sequence[int], begins: Iterable[Point], simulate: Simulate, most: int) -> Searched:
    """The front of what is found from `begins`. `sizes`: values on each axis; `most`: settings that are simulated."""
    known = explore(sizes, begins, lambda point: simulate(point, False), most)
    long = sorted(known, key=lambda point: (-closeness(known, point), point))[:MOST_LONG]
    sharp = {
        point: figures
        for point in long
        if closeness(known, point) >= 1 - 2 * SHORT_NOISE and (figures := simulate(point, True)) is not None
    }
    return Searched(front(sharp), len(known), len(known) < most)


def explore(
    sizes: Sequence[int], begins: Iterable[Point], evaluate: Callable[[Point], Figures | None], most: int
) -> dict[Point, Figures]:
    """Pareto local search: the neighbours of all that is near the front, until that has no new ones.

    So are those of the fastest at each value of the first axis: a begin that is far from the front climbs up to it.
    """
    known: dict[Point, Figures] = {}
    seen, expanded = set[Point](), set[Point]()

    def look(points: Iterable[Point]) -> None:
        for point in points:
            if point not in seen and len(known) < most:
                seen.add(point)
                if (figures := evaluate(point)) is not None:
                    known[point] = figures

    look(begins)
    while len(known) < most:
        fastest: dict[int, Point] = {}
        for point in sorted(known):
            fastest[point[0]] = max(point, fastest.get(point[0], point), key=lambda each: known[each].sustained)
        near = {point for point in known if closeness(known, point) >= 1 - SHORT_NOISE} | set(fastest.values())
        if not (near := near - expanded):
            break
        point = max(near, key=lambda each: (closeness(known, each), each))
        expanded.add(point)
        look(neighbours(point, sizes))
    return known


def neighbours(point: Point, sizes: Sequence[int]) -> Iterator[Point]:
    """One step on one axis.

    >>> list(neighbours((0, 1), sizes=(1, 3)))
    [(0, 0), (0, 2)]
    """
    for axis, size in enumerate(sizes):
        for place in (point[axis] - 1, point[axis] + 1):
            if 0 <= place < size:
                yield (*point[:axis], place, *point[axis + 1 :])


def closeness(known: Mapping[Point, Figures], point: Point) -> float:
    """Its tokens/s over those of the fastest that is not older: 1 on the front."""
    own = known[point]
    best = max(each.sustained for each in known.values() if each.staleness_mean <= own.staleness_mean + SAME_AGE)
    return own.sustained / best


def front(known: Mapping[Point, Figures]) -> list[Found]:
    """Each is faster, by GAIN at least, than all that are not older."""
    found: list[Found] = []
    order = sorted(known, key=lambda point: (known[point].staleness_mean, -known[point].sustained, point))
    for point in order:
        if not found or known[point].sustained > found[-1].figures.sustained * (1 + GAIN):
            found.append(Found(point, known[point]))
    return found


def choose(found: Sequence[Found], rule: Rule) -> Found:
    """Choose a setting of a front, which is not empty. Raises ValueError where all are too old for the rule."""
    young = [each for each in found if rule.mean_age is None or each.figures.staleness_mean <= rule.mean_age]
    if not young:
        freshest = found[0].figures.staleness_mean
        raise ValueError(
            f"{rule.mean_age:g} is below the {freshest:.2f} of the freshest setting; allowed: from there on"
        )
    fastest = max(each.figures.sustained for each in young)
    return next(each for each in young if each.figures.sustained >= (1 - rule.within) * fastest)


def limit(figures: Figures) -> str:
    """What keeps a setting from being faster, in words."""
    learner, servers = figures.idle_learner < BUSY, figures.idle_generator < BUSY
    if learner and servers:
        return "both sides are busy"
    if learner:
        return "the learner limits"
    if servers:
        return "the servers limit"
    return "each side waits for the other"

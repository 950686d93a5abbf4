"""Two small fits: a line without negative parts, and a search for the least of a function of a few positive numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def positive_line(amounts: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """(fixed, each), both at least 0, by least squares of fixed + each x amount to the values.

    Amounts that are all alike say nothing of a fixed part: everything is then counted for each.
    """
    x, y = np.asarray(amounts, float), np.asarray(values, float)
    if not len(x):
        return 0.0, 0.0
    if x.std() < 1e-3 * max(1e-12, abs(x.mean())):
        return (0.0, float(y.mean() / x.mean())) if x.mean() > 0 else (float(y.mean()), 0.0)
    each = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    fixed = float(y.mean() - each * x.mean())
    if each < 0:
        return float(max(0.0, y.mean())), 0.0
    if fixed < 0:
        return 0.0, float(max(0.0, (x * y).sum() / (x * x).sum()))
    return fixed, each


def least(
    function: Callable[[list[float]], float], start: Sequence[float], calls: int, spread: float = 0.7
) -> list[float]:
    """The positive numbers for which `function` is least, as far as so many calls find them.

    The simplex search of Nelder and Mead (1965) over the logarithms: no number becomes negative, and all have a say
    whatever their sizes. `spread`: of the first simplex, in e-folds.
    """

    def value(point: np.ndarray) -> float:
        return function([math.exp(number) for number in point])

    origin = np.log(np.asarray(start, float))
    points = [origin, *(origin + spread * row for row in np.eye(len(origin)))]
    simplex = sorted(((value(point), tuple(point)) for point in points), key=lambda corner: corner[0])
    used = len(simplex)
    while used < calls:
        worst, centre = np.array(simplex[-1][1]), np.mean([corner[1] for corner in simplex[:-1]], axis=0)
        reflected = _corner(value, centre + (centre - worst))
        used += 1
        if reflected[0] < simplex[0][0]:
            expanded = _corner(value, centre + 2 * (centre - worst))
            used += 1
            simplex[-1] = min(reflected, expanded)
        elif reflected[0] < simplex[-2][0]:
            simplex[-1] = reflected
        else:
            inside = _corner(value, centre + 0.5 * (np.array(min(reflected, simplex[-1])[1]) - centre))
            used += 1
            if inside[0] < simplex[-1][0]:
                simplex[-1] = inside
            else:
                best = np.array(simplex[0][1])
                simplex = [simplex[0], *(_corner(value, (best + np.array(point)) / 2) for _, point in simplex[1:])]
                used += len(simplex) - 1
        simplex.sort(key=lambda corner: corner[0])
    return [math.exp(number) for number in simplex[0][1]]


def _corner(value: Callable[[np.ndarray], float], point: np.ndarray) -> tuple[float, tuple[float, ...]]:
    return value(point), tuple(float(number) for number in point)

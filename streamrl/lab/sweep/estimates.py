"""What several seeds say together: a mean with its 95 % confidence interval, of figures and of whole curves. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.observe.student import student_t

NOTHING = 1e-9  # below it an interval is rounding

MOST_DIGITS = 5  # behind the point; smaller figures are written with an exponent


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds. `half_width` of its 95 % interval; None for one seed, which has none."""

    mean: float
    half_width: float | None
    seeds: int

    def __str__(self) -> str:
        """`0.91 ± 0.03`, `0.912 ± 0.012`: digits that the interval has (two where it begins with 1); `0.912` alone
        for one seed, or where all seeds agree.
        """
        if self.half_width is None or self.half_width < NOTHING:
            return f"{self.mean:.0f}" if abs(self.mean) >= 999.5 else f"{round(self.mean, 9):.3g}"
        places = digits(self.half_width)
        if places > MOST_DIGITS:
            return f"{_with_exponent(self.mean, places)} ± {_with_exponent(self.half_width, places)}"
        return f"{self.mean:.{places}f} ± {self.half_width:.{places}f}"


@dataclass(frozen=True, slots=True)
class Band:
    """A curve over seeds: the mean at each place, and the ends of its 95 % interval (equal to it for one seed)."""

    places: np.ndarray  # float64 [N]
    mean: np.ndarray  # float64 [N]
    low: np.ndarray  # float64 [N]
    high: np.ndarray  # float64 [N]


def digits(half_width: float) -> int:
    """Behind the point, that a figure with this interval has: one of the interval's, two where it begins with 1.

    >>> digits(0.03), digits(0.012), digits(357.0)
    (2, 3, 0)
    """
    if half_width < NOTHING:
        return 2
    size = math.floor(math.log10(half_width))
    return max(0, -size + (half_width < 2 * 10**size))


def _with_exponent(value: float, places: int) -> str:
    """As far as so many digits behind the point.

    >>> _with_exponent(0.001234, 6), _with_exponent(4e-6, 6), _with_exponent(1e-8, 6)
    ('1.234e-03', '4e-06', '1e-08')
    """
    power = math.floor(math.log10(abs(value))) if value else -places
    return f"{value:.{max(0, places + power)}e}"


def estimate(values: Sequence[float]) -> Estimate | None:
    """The mean of one value a seed; None without any.

    >>> str(estimate([1.0, 2.0, 3.0]))
    '2 ± 2'
    """
    count = len(values)
    if count == 0:
        return None
    centre = math.fsum(values) / count
    if count == 1:
        return Estimate(centre, None, 1)
    variance = math.fsum((value - centre) ** 2 for value in values) / (count - 1)
    return Estimate(centre, student_t(count - 1) * math.sqrt(variance / count), count)


def band(curves: Sequence[tuple[Sequence[float], Sequence[float]]], points: int = 200) -> Band:
    """The curves of the seeds, each (places ascending, values), at `points` common places.

    They reach from the last first place to the first last one, so that every seed is in each mean. Between its
    places a curve is taken to be straight.
    """
    begin, end = max(places[0] for places, _ in curves), min(places[-1] for places, _ in curves)
    common = np.linspace(begin, end, points)
    values = np.stack([np.interp(common, places, each) for places, each in curves])
    mean = values.mean(0)
    half = 0.0 * mean
    if len(curves) > 1:
        half = student_t(len(curves) - 1) * values.std(0, ddof=1) / math.sqrt(len(curves))
    return Band(common, mean, mean - half, mean + half)

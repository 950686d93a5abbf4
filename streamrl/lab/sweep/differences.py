"""What a point has more than the baseline point of its sweep, seed by seed, with two 95 % intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.lab.sweep.estimates import Estimate, digits, estimate

# The figures that are compared: where a point ends, and how early it gets there.
COMPARED = ("reward", "reward over the run")

# Resamples of the bootstrap: its ends move by about two hundredths of the interval from one SEED to another.
RESAMPLES = 10_000

# Of the bootstrap: the same runs give the same interval.
SEED = 0

TAIL = 0.025  # of the distribution, outside each end


@dataclass(frozen=True, slots=True)
class Difference:
    """The mean over the seeds of a point's figure minus the baseline's with the same seed.

    `low` and `high` are the ends of the bootstrap's interval; None for one seed, which has none.
    """

    estimate: Estimate  # with Student's t
    low: float | None
    high: float | None

    @property
    def student(self) -> str:
        """The ends of Student's interval, `-0.09 .. 0.05`, with one digit more than the difference; `-` without one."""
        half = self.estimate.half_width
        return "-" if half is None else self._ends(self.estimate.mean - half, self.estimate.mean + half)

    @property
    def bootstrap(self) -> str:
        """The ends of the bootstrap's."""
        return "-" if self.low is None or self.high is None else self._ends(self.low, self.high)

    def _ends(self, low: float, high: float) -> str:
        places = digits(self.estimate.half_width or 0.0) + 1
        return f"{low:.{places}f} .. {high:.{places}f}"


def difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """The difference of one figure from the baseline's, seed by seed; None without a seed that both have.

    >>> found = difference({1: 0.5, 2: 0.9, 3: 0.7}, {1: 0.3, 2: 0.6, 3: 0.6, 4: 0.1})
    >>> str(found.estimate), found.student, found.bootstrap
    ('0.2 ± 0.2', '-0.05 .. 0.45', '0.10 .. 0.30')
    """
    each = [value - baseline[seed] for seed, value in sorted(values.items()) if seed in baseline]
    mean = estimate(each)
    if mean is None:
        return None
    low, high = bootstrap(each) if len(each) > 1 else (None, None)
    return Difference(mean, low, high)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The geometric mean over the seeds of a point's figure over the baseline's with the same seed.

    student, bootstrap: the ends of its 95 % intervals, of the logarithms; None for one seed, which has none.
    """

    mean: float
    student: tuple[float, float] | None
    bootstrap: tuple[float, float] | None
    seeds: int

    def cells(self) -> list[str]:
        """`0.62`, `0.51 .. 0.75`, `0.55 .. 0.71`, or `-` for what there is not."""
        ends = (self.student, self.bootstrap)
        return [f"{self.mean:.2f}", *("-" if each is None else f"{each[0]:.2f} .. {each[1]:.2f}" for each in ends)]


def ratio(values: Mapping[int, float], baseline: Mapping[int, float]) -> Ratio | None:
    """The ratio of one figure to the baseline's, seed by seed; None without a seed in which both are above 0.

    >>> ratio({1: 50.0, 2: 80.0, 3: 60.0}, {1: 100.0, 2: 100.0, 4: 100.0}).cells()
    ['0.63', '0.03 .. 12.53', '0.50 .. 0.80']
    """
    pairs = [(value, baseline.get(seed, 0.0)) for seed, value in sorted(values.items())]
    logs = [math.log(value / other) for value, other in pairs if min(value, other) > 0]
    if (mean := estimate(logs)) is None:
        return None
    half, drawn = mean.half_width, bootstrap(logs) if len(logs) > 1 else None
    return Ratio(
        mean=math.exp(mean.mean),
        student=None if half is None else (math.exp(mean.mean - half), math.exp(mean.mean + half)),
        bootstrap=None if drawn is None else (math.exp(drawn[0]), math.exp(drawn[1])),
        seeds=mean.seeds,
    )


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The percentile interval of the mean: the quantiles of the means of resamples, drawn with replacement.

    It assumes no distribution, and is too narrow for few values: that of five normal ones holds their true mean in
    about 85 % of all sweeps. Student's interval, which assumes a normal distribution, is the one to judge by.
    """
    drawn = np.random.default_rng(SEED).integers(len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(np.asarray(values)[drawn].mean(1), (TAIL, 1 - TAIL))
    return float(low), float(high)

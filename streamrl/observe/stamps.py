"""Whether tokens were drawn by the version that is stamped on them, or by one beside it.

A step that changes little hides a wrong stamp below every limit on single tokens. Over many of them it shows. Of a
token that is stamped with version v, and a kept neighbour w of v:

    s = recorded log-prob - log p_v         d = log p_w - log p_v

Where v drew the tokens s is rounding, which knows nothing of w: the slope of s over d is 0. Where w drew them it is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from streamrl.observe.student import NORMAL, student_t

TOLD = 4.0  # standard errors by which 0 and 1 must be apart for a slope to tell them apart
BETWEEN = 0.5  # a slope beyond it is nearer to the neighbour


@dataclass(frozen=True, slots=True)
class Slope:
    """How much of the way to the neighbour the tokens are, 0 to 1, and its standard error.

    The error is estimated from how much the slope changes without one sample, and is infinite for a single one; for few
    it is larger by as much as an interval by Student's t is wider than a normal one.
    """

    value: float
    error: float

    @property
    def tells(self) -> bool:
        """Whether the versions differ enough, over enough tokens, to be told apart."""
        return self.error * TOLD < 1.0

    @property
    def wrong(self) -> bool:
        """Whether the neighbour has drawn the tokens, rather than the version of their stamp."""
        return self.tells and self.value > BETWEEN


@dataclass
class Neighbours:
    """The slope of the tokens of a run, towards the versions before their own, or towards those behind."""

    # Of each sample: tokens, and the sums of s, d, s d and d d over them. The tokens of a sample are not independent.
    _sums: list[tuple[float, float, float, float, float]] = field(default_factory=list)

    def add(self, recorded: np.ndarray, own: np.ndarray, other: np.ndarray) -> None:
        """The log-probs of tokens of one sample, each [T]: as recorded, by the stamped version, by its neighbour."""
        with np.errstate(invalid="ignore"):  # a token that both call impossible
            s, d = (np.float64(values) - own for values in (recorded, other))
        seen = np.isfinite(s) & np.isfinite(d)
        s, d = s[seen], d[seen]
        self._sums.append((len(s), float(s.sum()), float(d.sum()), float(s @ d), float(d @ d)))

    @property
    def tokens(self) -> int:
        return int(sum(each[0] for each in self._sums))

    def slope(self) -> Slope | None:
        """None where the versions do not differ on any token."""
        if not self._sums:
            return None
        n, s, d, sd, dd = np.array(self._sums, np.float64).T
        total = n.sum()
        s_mean, d_mean = (s.sum() / total, d.sum() / total) if total else (0.0, 0.0)
        # Per sample, of what is left when both means are taken off.
        products = sd - s_mean * d - d_mean * s + n * s_mean * d_mean
        squares = dd - 2 * d_mean * d + n * d_mean**2
        if not (whole := squares.sum()) > 0:
            return None
        products, squares = products[squares > 0], squares[squares > 0]
        value, count = float(products.sum() / whole), len(squares)
        if count == 1:
            return Slope(value, math.inf)
        without = (products.sum() - products) / (squares.sum() - squares)
        error = math.sqrt((count - 1) * float(without.var()))
        return Slope(value, error * student_t(count - 1) / NORMAL)


def spread_over(sizes: Sequence[int], most: int, *, fewest: int = 1) -> list[int]:
    """Which of some samples with `sizes` tokens are looked at: evenly spread, and about `most` tokens together.

    `fewest`: samples at the least, where there are as many.
    """
    total = sum(sizes)
    if total <= most:
        return list(range(len(sizes)))
    count = min(len(sizes), max(fewest, len(sizes) * most // total))
    return sorted({index * len(sizes) // count for index in range(count)})

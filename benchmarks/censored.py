"""Values of runs of which some were ended before what was waited for: intervals, and their medians. None is left out.

A run that has not reached the reward when it ends, after 230 s, would have needed more: it counts as 230 s or more.
Both ends of a ratio follow. The lower end of a median is the median of the lower ends, and so the upper one.

>>> values = [exact(160.0), exact(171.0), at_least(230.0)]
>>> told(values, ".0f")
'171 (160 .. >230)'
>>> told([over(exact(464.0), value) for value in values])
'2.71 (<2.02 .. 2.90)'
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """A value that is at least `low` and at most `high`; infinity where nothing is known of that end."""

    low: float
    high: float


def exact(value: float) -> Interval:
    return Interval(value, value)


def at_least(value: float) -> Interval:
    return Interval(value, math.inf)


def over(above: Interval, below: Interval) -> Interval:
    """`above / below` of positive values."""
    return Interval(above.low / below.high, above.high / below.low)


def median(values: Sequence[Interval]) -> Interval:
    return Interval(statistics.median(value.low for value in values), statistics.median(value.high for value in values))


def told(values: Sequence[Interval], form: str = ".2f") -> str:
    """The median, with the smallest and the largest; `>` and `<` before an end that is all that is known."""
    if not values:
        return ""
    smallest = min(values, key=lambda value: (value.low, value.high))
    largest = max(values, key=lambda value: (value.high, value.low))
    return f"{_told(median(values), form)} ({_told(smallest, form)} .. {_told(largest, form)})"


def _told(value: Interval, form: str) -> str:
    if value.low == value.high:
        return f"{value.low:{form}}"
    if value.low == 0 and math.isinf(value.high):
        return "?"
    if value.low == 0:
        return f"<{value.high:{form}}"
    if math.isinf(value.high):
        return f">{value.low:{form}}"
    return f"{value.low:{form}}-{value.high:{form}}"

"""How long the rest of a sweep takes, by the time of its finished runs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def seconds_left(left: Mapping[str, float], taken: Mapping[str, Sequence[float]]) -> float | None:
    """Seconds of the missing runs, one after another; None where none is missing, or none has been timed.

    `left`: the missing runs of each point, a begun one as the share of its steps that is missing. `taken`: seconds of
    the finished runs of each point. A point without one takes as long as the mean of those that have one.

    >>> seconds_left({"short": 2, "long": 0.5, "new": 1}, {"short": [60, 80], "long": [110]})
    285.0
    """
    means = {point: math.fsum(seconds) / len(seconds) for point, seconds in taken.items() if seconds}
    if not left or not means:
        return None
    other = math.fsum(means.values()) / len(means)
    return math.fsum(runs * means.get(point, other) for point, runs in left.items())


def in_words(seconds: float) -> str:
    """
    >>> in_words(20), in_words(5430), in_words(12000)
    ('less than a minute', 'about 90 minutes', 'about 3.3 hours')
    """
    if seconds < 60:
        return "less than a minute"
    if seconds < 7200:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:.1f} hours"


def summary(runs: int, done: int, seconds: float | None, minutes: float | None = None) -> str:
    """What there is to do, before it begins. `minutes`: of a run, about, as the sweep's file says.

    >>> summary(80, 16, 5430.0)
    '80 runs, 16 done; about 90 minutes by the time of the finished ones'
    >>> summary(80, 0, None)
    '80 runs, 0 done; how long they take is known when the first one ends'
    >>> summary(15, 0, None, minutes=10)
    '15 runs, 0 done; about 2.5 hours, at 10 minutes a run as its file says'
    """
    counted = f"{runs} runs, {done} done"
    if done == runs:
        return counted
    if seconds is not None:
        return f"{counted}; {in_words(seconds)} by the time of the finished ones"
    if minutes is not None:
        return f"{counted}; {in_words(60 * minutes * (runs - done))}, at {minutes:g} minutes a run as its file says"
    return f"{counted}; how long they take is known when the first one ends"

"""Countdown: reach a target with given numbers, each of them once."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from streamrl.tasks.arithmetic import evaluate


def verdict(expression: str, numbers: Sequence[int], target: int) -> bool | None:
    """Whether `expression` uses each of `numbers` exactly once and is worth `target`.

    None where it is no arithmetic, or uses other numbers: that is no attempt, and earns nothing.

    >>> verdict("(25 - 4) * 2", [2, 4, 25], 42)
    True
    """
    try:
        found = evaluate(expression)
    except ValueError:
        return None
    if sorted(found.numbers) != sorted(Fraction(number) for number in numbers):
        return None
    return found.value == target

"""The estimators of an evaluation: pass@k without bias, and means with their standard errors. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Mean(msgspec.Struct, frozen=True):
    """A mean over the prompts of a task.

    `error` is its standard error with the prompts as the units, so that it covers the choice of the prompts and that
    of the answers to each (arXiv:2411.00640, section 3.1); None for fewer than two prompts.
    """

    value: float
    error: float | None
    prompts: int


def pass_at_k(answers: int, right: int, k: int) -> float:
    """The chance that one of `k` answers is right at least, from `right` of `answers` independent ones: unbiased.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, equation 1), with the quotient as the product of
    1 - k / i over i = n - c + 1 .. n: no number overflows, and a small chance keeps all its digits.

    Raises ValueError unless 1 <= k <= answers and 0 <= right <= answers.

    >>> round(pass_at_k(answers=8, right=2, k=1), 4), round(pass_at_k(answers=8, right=2, k=4), 4)
    (0.25, 0.7857)
    """
    if not 1 <= k <= answers:
        raise ValueError(f"pass@{k} from {answers} answers; allowed: k from 1 to the number of answers")
    if not 0 <= right <= answers:
        raise ValueError(f"{right} right ones of {answers} answers; allowed: 0 to {answers}")
    if answers - right < k:
        return 1.0
    if right == 0:
        return 0.0
    wrong = math.fsum(math.log1p(-k / i) for i in range(answers - right + 1, answers + 1))
    return -math.expm1(wrong)


def mean(values: Sequence[float]) -> Mean | None:
    """The mean of one value a prompt; None without any."""
    count = len(values)
    if count == 0:
        return None
    centre = math.fsum(values) / count
    if count == 1:
        return Mean(centre, None, 1)
    variance = math.fsum((value - centre) ** 2 for value in values) / (count - 1)
    return Mean(centre, math.sqrt(variance / count), count)

"""How far a server computes from the learner with the same weights: log-probs of the same tokens, as metrics.

Of a token that the learner scores with the published weights v and with those published before, w, and a server that
reports v scores as well:

    mismatch = |server - log p_v|        slope of (server - log p_v) over (log p_w - log p_v): `observe/stamps.py`

Rounding is in all three. Where it is larger than what lies between the versions the slope is near one half, whichever
weights the server has, and from below where they are the right ones: only what is clearly beyond one half says that
they are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from streamrl.observe.limits import Limits
from streamrl.observe.stamps import BETWEEN, TOLD, Neighbours

LEAST_ANSWERS = 4
"""Whose slope is told: its error is estimated from how the answers differ."""


_LEAST_ERROR = 1e-9  # where rounding is none at all, an error is 0


class Scores(NamedTuple):
    """Log-probs of n tokens of one answer, each [n]."""

    server: np.ndarray
    learner: np.ndarray
    former: np.ndarray  # by the learner's weights of the version before


def mismatch_metrics(answers: Sequence[Scores], limits: Limits, rounding: Limits | None = None) -> dict[str, float]:
    """Metrics `mismatch/...` of one server; `limits` to which it is held, `rounding` that was measured of it.

    A token without a finite log-prob on one side alone is infinitely far: such tokens have a metric of their own, and
    mean and maximum are of the others, where there are any.
    """
    differences = np.concatenate([_difference(answer.server, answer.learner) for answer in answers])
    finite = differences[np.isfinite(differences)]
    metrics = {
        "mismatch/infinite": 1 - len(finite) / len(differences),
        "mismatch/equal": float(np.mean(differences == 0)),
        "mismatch/limit": limits.mean,
    }
    if len(finite):
        metrics |= {"mismatch/mean": float(finite.mean()), "mismatch/max": float(finite.max())}
    if rounding is not None:
        metrics["mismatch/rounding"] = rounding.mean
    towards = Neighbours()
    for answer in answers:
        towards.add(answer.server, answer.learner, answer.former)
    if len(answers) >= LEAST_ANSWERS and (slope := towards.slope()) is not None:
        metrics |= {"mismatch/slope": slope.value, "mismatch/slope_error": slope.error}
    return metrics


def together(slopes: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The slope of several versions and its standard error, from the (slope, error) of each, at least one.

    Each counts by the inverse of its variance, so that a version of which little is known hides none of the others.
    Where they scatter more than their errors explain, the error is larger by that (Birge's ratio).

    >>> [round(each, 2) for each in together([(0.8, 0.1), (0.8, 0.1), (0.2, 10.0)])]
    [0.8, 0.07]
    """
    values, errors = np.array(slopes, np.float64).T
    weights = 1 / np.maximum(errors, _LEAST_ERROR) ** 2
    value = float(weights @ values / weights.sum())
    scatter = float(weights @ (values - value) ** 2) / max(len(values) - 1, 1)
    return value, math.sqrt(max(scatter, 1.0) / float(weights.sum()))


def over(mean: float, limit: float) -> float:
    """How many times its limit a mismatch is."""
    return mean / limit if limit > 0 else float("inf")


def has_other_weights(slope: float, error: float) -> bool:
    """Is a server clearly nearer to the weights before those that it reports?"""
    return slope - TOLD * error > BETWEEN


def excess(metrics: Mapping[str, float]) -> float:
    """By which servers are compared: above 1 one is further from the learner than it should be."""
    slope, error = metrics.get("mismatch/slope"), metrics.get("mismatch/slope_error")
    if metrics.get("mismatch/infinite", 0.0) > 0:
        return float("inf")
    if slope is not None and error is not None and has_other_weights(slope, error):
        return float("inf")
    return over(metrics.get("mismatch/mean", 0.0), metrics.get("mismatch/limit", float("inf")))


def _difference(server: np.ndarray, learner: np.ndarray) -> np.ndarray:
    """float64 [n], absolute."""
    with np.errstate(invalid="ignore"):  # minus infinity on both sides is no difference
        found: np.ndarray = np.abs(np.float64(server) - learner)
    return np.where(np.isnan(found), np.where(server == learner, 0.0, np.inf), found)

"""Metrics of how far a server computes from the learner, and what they tell of its weights."""

from __future__ import annotations

import math

import numpy as np
import pytest

from streamrl.observe.limits import Limits
from streamrl.observe.metrics import is_known
from streamrl.observe.mismatch import LEAST_ANSWERS, Scores, excess, has_other_weights, mismatch_metrics, together

LIMITS = Limits(largest=1.0, p99=0.5, mean=0.01)


def answers(
    weights: float, step: float, rounding: float, count: int = 16, tokens: int = 40, *, seed: int = 7
) -> list[Scores]:
    """Of a server that is `weights` of the way to the former ones; a step changes log-probs by `step`."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        published = -np.abs(random.normal(2, 1, tokens))
        former = published + step * random.normal(size=tokens)
        server = published + weights * (former - published)
        noise = rounding * random.normal(size=(3, tokens))
        made.append(Scores(server + noise[0], published + noise[1], former + noise[2]))
    return made


def is_told(metrics: dict[str, float]) -> bool:
    return has_other_weights(metrics["mismatch/slope"], metrics["mismatch/slope_error"])


def test_equal_scores_are_no_mismatch_and_those_of_the_former_weights_are_told_for_sure() -> None:
    same = mismatch_metrics(answers(0.0, 0.1, 0.0), LIMITS)
    assert (same["mismatch/mean"], same["mismatch/max"], same["mismatch/equal"]) == (0, 0, 1)
    assert same["mismatch/slope"] == pytest.approx(0)
    assert excess(same) == 0
    former = mismatch_metrics(answers(1.0, 0.1, 0.0), LIMITS)
    assert former["mismatch/slope"] == pytest.approx(1)
    assert former["mismatch/mean"] > LIMITS.mean
    assert is_told(former)
    assert math.isinf(excess(former))


def test_a_step_below_the_rounding_still_tells_former_weights_from_published_ones_given_enough_tokens() -> None:
    published, former = (mismatch_metrics(answers(way, 0.002, 0.004, 64, 400), LIMITS) for way in (0.0, 1.0))
    assert former["mismatch/mean"] < LIMITS.mean  # too little for the limit
    assert is_told(former)
    assert 0.3 < published["mismatch/slope"] < 0.5 < former["mismatch/slope"] < 0.7
    assert not is_told(published)


def test_the_slope_of_many_versions_is_as_exact_as_that_of_all_their_answers() -> None:
    for way in (0.0, 1.0):
        versions = [mismatch_metrics(answers(way, 0.002, 0.004, 8, 60, seed=seed), LIMITS) for seed in range(100)]
        slopes = [(each["mismatch/slope"], each["mismatch/slope_error"]) for each in versions]
        slope, error = together(slopes)
        assert abs(slope - (16 / 36 if way == 0 else 20 / 36)) < 3 * error  # (way d^2 + r^2) / (d^2 + 2 r^2)
        assert 0.5 < error / (np.std([value for value, _ in slopes]) / math.sqrt(100)) < 2
        assert has_other_weights(slope, error) == (way == 1)
        assert sum(map(is_told, versions)) < 10


def test_a_version_of_which_nothing_is_known_hides_no_other_and_scatter_makes_the_error_larger() -> None:
    assert together([(0.8, 0.05)]) == pytest.approx((0.8, 0.05))
    assert together([(0.8, 0.05), (0.0, math.inf)]) == pytest.approx((0.8, 0.05))
    assert together([(0.7, 0.01), (0.9, 0.01)]) == pytest.approx((0.8, 0.1))
    assert together([(0.0, 0.0), (0.0, 0.0)]) == pytest.approx((0, 0), abs=1e-8)


def test_a_step_that_changed_nothing_tells_nothing_of_the_weights() -> None:
    for way in (0.0, 1.0):
        drowned = mismatch_metrics(answers(way, 1e-9, 0.004), LIMITS)
        assert not is_told(drowned)
        assert excess(drowned) < 1
    assert "mismatch/slope" not in mismatch_metrics(answers(0.0, 0.0, 0.0), LIMITS)
    assert "mismatch/slope" not in mismatch_metrics(answers(0.0, 0.1, 0.0, LEAST_ANSWERS - 1), LIMITS)


def test_a_token_that_one_side_alone_calls_impossible_is_infinitely_far() -> None:
    one = Scores(np.array([-1.0, -np.inf]), np.array([-1.0, -np.inf]), np.array([-1.0, -np.inf]))
    assert mismatch_metrics([one], LIMITS)["mismatch/max"] == 0
    other = one._replace(learner=np.array([-1.0, -2.0]))
    for far in (other, one._replace(server=np.array([-1.0, np.nan]), learner=np.array([-1.0, -2.0]))):
        metrics = mismatch_metrics([far], LIMITS)
        assert (metrics["mismatch/infinite"], metrics["mismatch/mean"], metrics["mismatch/max"]) == (0.5, 0, 0)
        assert math.isinf(excess(metrics))
    none = Scores(*[np.array([value] * 2) for value in (np.nan, -1.0, -1.0)])
    assert mismatch_metrics([none], LIMITS) == {
        "mismatch/infinite": 1,
        "mismatch/equal": 0,
        "mismatch/limit": LIMITS.mean,
    }


def test_what_is_told_are_metrics_of_the_table() -> None:
    assert all(map(is_known, mismatch_metrics(answers(0.0, 0.1, 0.0), LIMITS, LIMITS)))

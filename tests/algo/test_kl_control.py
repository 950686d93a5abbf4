"""The adaptive weight of the KL against its formula, and what it refuses."""

from __future__ import annotations

import math

import pytest

from streamrl.algo.kl_control import KlControl
from streamrl.config.algo import AlgoConfig


@pytest.mark.parametrize(("key", "metric"), [("kl", "loss/kl"), ("kl_reward", "reward/kl")])
def test_the_weight_follows_the_measured_divergence(key, metric):
    control = KlControl(AlgoConfig(**{key: 0.5}, kl_target=0.1, kl_horizon=100))
    expected = 0.5
    for measured, samples in ((0.3, 50), (0.09, 10), (0.0, 1000), (math.nan, 50), (0.1, 50)):
        assert control.metrics() == {f"{metric}_weight": pytest.approx(expected)}
        assert getattr(control.applied(), key) == pytest.approx(expected)
        control.update({metric: measured}, samples)
        if not math.isnan(measured):
            expected *= 1 + max(-0.2, min(0.2, measured / 0.1 - 1)) * min(samples, 100) / 100
    assert control.weight == pytest.approx(expected)


def test_without_a_target_the_settings_are_what_they_were():
    config = AlgoConfig(kl=0.5)
    control = KlControl(config)
    control.update({"loss/kl": 9.0}, 50)
    assert control.applied() is config
    assert control.metrics() == {}


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"kl_target": 0.1}, "neither is above 0"),
        ({"kl_target": 0.1, "kl": 1.0, "kl_reward": 1.0}, "both are above 0"),
        ({"kl": 1.0, "kl_estimator": "full", "kl_straight_through": True}, "does nothing with kl_estimator=full"),
        ({"kl_reward": 1.0, "kl_reward_estimator": "full"}, "full is not allowed: the reward is of tokens"),
        (
            {"kl_reward": 1.0, "kl_reward_estimator": "streamrl.algo.divergences.full:Full"},
            "is of the whole vocabulary",
        ),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(keys, line):
    with pytest.raises(ValueError, match=line):
        AlgoConfig(**keys)

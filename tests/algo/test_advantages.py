"""Group-relative advantages against arithmetic done by hand."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from benchmarks.losses_rewards import above_the_baseline
from streamrl.algo.advantages import carries_signal, group_advantages
from streamrl.choices import BASELINES
from streamrl.config.algo import AdvantageConfig

STD = ("population", "sample", "none")
BASELINE = BASELINES.names
LENGTHS = (3, 0, 9, 4, 2, 5, 1, 7)
TINY = (0.0, 5e-324, 2.2e-311, 2.3e-308)


def slow_advantages(rewards: list[float], valid: list[bool], config: AdvantageConfig) -> list[float]:
    present = [reward for reward, ok in zip(rewards, valid, strict=True) if ok]
    if len(set(present)) < 2:
        return [0.0] * len(rewards)
    deviation = {"population": statistics.pstdev, "sample": statistics.stdev, "none": None}[config.std]
    lengths = [length for length, ok in zip(LENGTHS, valid, strict=False) if ok]
    leads = iter(above_the_baseline(present, lengths, config.baseline))
    divisor = 1.0 if deviation is None else deviation(present) + config.eps
    return [next(leads) / divisor if ok else 0.0 for ok in valid]


def lengths_of(rewards: torch.Tensor) -> torch.Tensor:
    return torch.tensor(LENGTHS[: len(rewards)])


@pytest.mark.parametrize("std", STD)
@pytest.mark.parametrize("baseline", BASELINE)
def test_every_baseline_and_deviation_equals_the_loop(std, baseline):
    config = AdvantageConfig(std=std, baseline=baseline)
    rewards = [0.0, 1.0, 0.25, 1.0, 7.0, -0.5]
    valid = [True, True, True, True, False, True]
    rewards = torch.tensor(rewards, dtype=torch.float64)
    result = group_advantages(rewards, torch.tensor(valid), config, lengths_of(rewards))
    assert result.tolist() == pytest.approx(slow_advantages(rewards.tolist(), valid, config), abs=1e-12)


def test_the_default_divides_by_the_population_deviation_plus_1e_4():
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    result = group_advantages(rewards, torch.ones(4, dtype=torch.bool), AdvantageConfig())
    assert result[0].item() == pytest.approx(0.75 / (0.1875**0.5 + 1e-4), abs=1e-12)


def test_a_placeholder_gets_zero_and_its_reward_changes_no_other_advantage():
    valid = torch.tensor([True, True, False, True])
    one = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.5]), valid, AdvantageConfig())
    other = group_advantages(torch.tensor([1.0, 0.0, 900.0, 0.5]), valid, AdvantageConfig())
    assert torch.equal(one, other)
    assert one[2] == 0


@pytest.mark.parametrize("std", STD)
@pytest.mark.parametrize("baseline", BASELINE)
@pytest.mark.parametrize(
    ("rewards", "valid"),
    [
        ([0.3], [True]),
        ([0.1, 0.1, 0.1], [True, True, True]),
        ([0.1, 0.9], [True, False]),
        ([1.0, 2.0], [False, False]),
        ([], []),
    ],
)
def test_a_group_without_signal_has_advantage_zero_even_with_eps_zero(std, baseline, rewards, valid):
    rewards, valid = torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid, dtype=torch.bool)
    config = AdvantageConfig(std=std, baseline=baseline, eps=0.0)
    assert not carries_signal(rewards, valid)
    assert torch.equal(group_advantages(rewards, valid, config, lengths_of(rewards)), torch.zeros_like(rewards))


def test_two_rewards_carry_signal():
    assert carries_signal(torch.tensor([0.0, 1.0]), torch.tensor([True, True]))


def test_a_baseline_by_length_without_lengths_is_refused():
    with pytest.raises(ValueError, match=r"lengths is None, algo.advantage.baseline=by_length needs it"):
        group_advantages(torch.zeros(2), torch.ones(2, dtype=torch.bool), AdvantageConfig(baseline="by_length"))


def test_what_other_trainers_have_and_no_group_can_give_is_refused_by_its_reason():
    with pytest.raises(ValueError, match="remax is not allowed: it needs a greedy answer to every prompt"):
        AdvantageConfig(baseline="remax")


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="must both be"):
        group_advantages(torch.zeros(3), torch.ones(2, dtype=torch.bool), AdvantageConfig())


@settings(max_examples=300)
@given(
    rewards=npst.arrays("float64", st.integers(0, 8), elements=st.sampled_from(TINY) | st.floats(-1e300, 1e300)),
    std=st.sampled_from(STD),
    baseline=st.sampled_from(BASELINE),
    eps=st.sampled_from([0.0, 1e-4]),
    data=st.data(),
)
def test_advantages_are_finite_for_finite_rewards(rewards, std, baseline, eps, data):
    valid = data.draw(npst.arrays("bool", len(rewards)))
    config = AdvantageConfig(std=std, baseline=baseline, eps=eps)
    rewards = torch.from_numpy(rewards)
    result = group_advantages(rewards, torch.from_numpy(valid), config, lengths_of(rewards))
    assert result.isfinite().all()


@given(order=st.permutations(range(6)))
def test_permuting_the_samples_permutes_the_advantages(order):
    rewards = torch.tensor([0.1, 0.2, 0.7, 1.0, 0.0, 0.4], dtype=torch.float64)
    valid = torch.tensor([True, True, False, True, True, True])
    straight = group_advantages(rewards, valid, AdvantageConfig())
    permuted = group_advantages(rewards[order], valid[order], AdvantageConfig())
    assert torch.allclose(permuted, straight[order], rtol=0, atol=1e-12)


def test_float32_stays_float32():
    result = group_advantages(torch.tensor([0.0, 1.0]), torch.tensor([True, True]), AdvantageConfig())
    assert result.dtype == torch.float32

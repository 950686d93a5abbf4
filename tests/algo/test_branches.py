"""Rollouts of several branches: one in advantages and sequence means, by loops in float64."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.losses_rewards import above_the_baseline
from streamrl.algo.advantages import group_advantages
from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.losses import policy_loss
from streamrl.algo.reward_penalty import Outcomes, penalised_advantages
from streamrl.algo.tokens import TokenBatch
from streamrl.choices import BASELINES
from streamrl.config.algo import AdvantageConfig, AlgoConfig

AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm")
LENGTHS = (5, 1, 7, 3, 6, 9)  # of the samples of `token_batch`
BRANCHES = (2, 1, 3)  # samples of each rollout


def slow_advantages(
    rollouts: list[list[float]], lengths: list[list[int]], failed: set[int], config: AdvantageConfig
) -> list[float]:
    """Of every sample, rollout by rollout; `failed`: rollouts that are placeholders."""
    present = [place for place in range(len(rollouts)) if place not in failed]
    rewards = [rollouts[place][-1] for place in present]
    if len(set(rewards)) < 2:
        return [0.0 for rollout in rollouts for _ in rollout]
    deviation = {"population": statistics.pstdev, "sample": statistics.stdev, "none": None}[config.std]
    divisor = 1.0 if deviation is None else deviation(rewards) + config.eps
    leads = above_the_baseline(rewards, [sum(lengths[place]) for place in present], config.baseline)
    lead_of = dict(zip(present, leads, strict=True))
    return [
        0.0 if place in failed else (lead_of[place] + own - rollout[-1]) / divisor
        for place, rollout in enumerate(rollouts)
        for own in rollout
    ]


@pytest.mark.parametrize("std", ["population", "sample", "none"])
@pytest.mark.parametrize("baseline", BASELINES.names)
@pytest.mark.parametrize("own", [False, True], ids=["one reward", "own rewards"])
def test_each_rollout_counts_once_and_its_branches_have_its_advantage(baseline, std, own):
    config = AdvantageConfig(baseline=baseline, std=std)
    rollouts = [[0.0], [1.0, 1.0, 1.0], [9.0], [0.25, 0.25], [1.5]]
    if own:
        rollouts[1], rollouts[3] = [0.5, 2.0, 1.0], [-1.0, 0.25]
    lengths = [[3], [1, 4, 0], [0], [2, 2], [7]]
    failed = {2}
    expected = slow_advantages(rollouts, lengths, failed, config)
    found = group_advantages(
        torch.tensor([reward for rollout in rollouts for reward in rollout], dtype=torch.float64),
        torch.tensor([place not in failed for place, rollout in enumerate(rollouts) for _ in rollout]),
        config,
        torch.tensor([length for rollout in lengths for length in rollout]),
        [len(rollout) for rollout in rollouts],
    )
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    if not own:
        assert len(set(found[1:4].tolist())) == 1


REWARDS = st.floats(-1e300, 1e300) | st.sampled_from([0.0, 5e-324, 1.0])
ROLLOUTS = st.lists(st.lists(REWARDS, min_size=1, max_size=3), min_size=1, max_size=4)


@given(rollouts=ROLLOUTS, eps=st.sampled_from([0.0, 1e-4]))
def test_advantages_are_finite_and_branches_of_one_reward_change_no_others(rollouts, eps):
    config = AdvantageConfig(eps=eps)
    samples = [reward for rollout in rollouts for reward in rollout]
    given_rewards = torch.tensor(samples, dtype=torch.float64)
    found = group_advantages(
        given_rewards, torch.ones(len(samples), dtype=torch.bool), config, branches=[len(each) for each in rollouts]
    )
    assert found.isfinite().all()
    finals = torch.tensor([rollout[-1] for rollout in rollouts], dtype=torch.float64)
    alone = group_advantages(finals, torch.ones(len(finals), dtype=torch.bool), config)
    last = torch.tensor([len(each) for each in rollouts]).cumsum(0) - 1
    assert torch.equal(found[last], alone)


def test_branches_that_are_not_those_of_the_samples_are_refused():
    rewards, valid = torch.tensor([1.0, 0.0]), torch.tensor([True, True])
    for branches in ((1,), (2, 1), (0, 2)):
        with pytest.raises(ValueError, match="must be at least 1 each, and 2 together"):
            group_advantages(rewards, valid, AdvantageConfig(), branches=branches)


def rollout_tokens(batch: TokenBatch, branches: tuple[int, ...]) -> torch.Tensor:
    """What `TokenBatch.rollout_tokens` says of a batch whose samples are those of these rollouts."""
    rollout = [place for place, count in enumerate(branches) for _ in range(count)]
    counts = [
        sum(int(batch.mask[t]) for t in range(len(batch.mask)) if rollout[int(batch.sample[t])] == place)
        for place in range(len(branches))
    ]
    return torch.tensor([counts[rollout[int(sample)]] for sample in batch.sample])


def slow_loss(batch: TokenBatch, config: AlgoConfig, branches: tuple[int, ...]) -> torch.Tensor:
    """GPG with an entropy bonus as its equations read: rollout by rollout, branch by branch, token by token."""
    total = torch.zeros((), dtype=torch.float64)
    trained = int(batch.mask.sum())
    rollouts, first = [], 0
    for count in branches:
        own = [t for t in range(len(batch.mask)) if batch.mask[t] and first <= int(batch.sample[t]) < first + count]
        rollouts.append(own)
        first += count
    known = sum(bool(own) for own in rollouts)
    for own in rollouts:
        for t in own:
            divisor = {
                "token_mean": trained,
                "sequence_mean": known * len(own),
                "sequence_sum": known,
                "sequence_sum_norm": known * (config.norm_length or 0),
            }[config.aggregation]
            term = -batch.advantages[t] * batch.logprobs[t] - config.entropy * batch.entropy[t]
            total = total + term / divisor
    return total


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("split", [(6,), (1, 5), (2, 2, 2), (1, 1, 1, 1, 1, 1)], ids=str)
def test_the_loss_equals_the_loop_however_branches_are_shared_among_micro_batches(token_batch, aggregation, split):
    batch = token_batch(3, lengths=LENGTHS)
    batch.mask[batch.sample == 2] = False  # a rollout without a trained token
    config = AlgoConfig(loss="gpg", weight="none", aggregation=aggregation, entropy=0.1, norm_length=20)
    expected = slow_loss(batch, config, BRANCHES)
    masks = [batch.mask[batch.sample == sample] for sample in range(batch.samples)]
    denominators = Denominators.of(masks, BRANCHES)
    assert denominators == Denominators(tokens=int(batch.mask.sum()), rollouts=2)
    whole = replace(batch, rollout_tokens=rollout_tokens(batch, BRANCHES))
    value, first = torch.zeros((), dtype=torch.float64), 0
    for count in split:
        inside = (batch.sample >= first) & (batch.sample < first + count)
        part = whole.select(inside.nonzero().squeeze(-1))
        value = value + policy_loss(replace(part, sample=part.sample - first, samples=count), config, denominators)[0]
        first += count
    leaves = (batch.logprobs, batch.entropy)
    assert value.item() == pytest.approx(expected.item(), abs=1e-12)
    for ours, theirs in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", ["clip", "gspo"])
def test_rollouts_of_one_branch_have_the_very_loss_of_samples(token_batch, aggregation, loss):
    batch = token_batch(5, lengths=LENGTHS, dtype=torch.float32)
    config = AlgoConfig(loss=loss, aggregation=aggregation, norm_length=20, weight="sequence")
    ones = (1,) * batch.samples
    masks = [batch.mask[batch.sample == sample] for sample in range(batch.samples)]
    assert Denominators.of(masks) == Denominators.of(masks, ones)
    value, _ = policy_loss(batch, config, Denominators.of(masks))
    told = replace(batch, rollout_tokens=rollout_tokens(batch, ones))
    other, _ = policy_loss(told, config, Denominators.of(masks, ones))
    assert torch.equal(value, other)
    (ours,), (theirs,) = (torch.autograd.grad(each, batch.logprobs) for each in (value, other))
    assert torch.equal(ours, theirs)


def test_a_branch_is_a_sequence_of_its_own_to_sequence_ratios(token_batch):
    batch = token_batch(7, lengths=(4, 6))
    config = AlgoConfig(loss="gspo", weight="sequence", aggregation="token_mean")
    apart, _ = policy_loss(batch, config, Denominators(tokens=10, rollouts=2))
    together, _ = policy_loss(
        replace(batch, rollout_tokens=rollout_tokens(batch, (2,))), config, Denominators(tokens=10, rollouts=1)
    )
    assert torch.equal(apart, together)


def test_what_the_kl_takes_off_a_reward_is_of_the_whole_rollout():
    branches = ((2, 1), ())
    outcomes = Outcomes(
        rewards=torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0], dtype=torch.float64),
        valid=torch.ones(5, dtype=torch.bool),
        first_place=torch.arange(5),
        lengths=torch.ones(5, dtype=torch.int64),
        sizes=(3, 2),
        branches=branches,
    )
    penalty = outcomes.together(torch.tensor([0.1, 0.3, 0.2, 0.5, 0.0], dtype=torch.float64))
    assert penalty.tolist() == pytest.approx([0.4, 0.4, 0.2, 0.5, 0.0])
    config = AlgoConfig(kl_reward=1.0, advantage={"std": "none"})
    found = penalised_advantages(outcomes, penalty, config)
    assert found.tolist() == pytest.approx([-0.1, -0.1, 0.1, -1.25, 1.25])
    alone = replace(outcomes, branches=())
    assert alone.together(penalty) is penalty
    assert math.isfinite(penalised_advantages(alone, penalty, config).sum())

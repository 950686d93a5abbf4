"""Advantages as their equations read, one group at a time: what streamrl.algo is compared with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.losses_reference import estimate
from streamrl.algo.tokens import TokenBatch
from streamrl.config.algo import AlgoConfig


def slow_penalised_advantages(batch: TokenBatch, rewards: Sequence[float], group: int, c: AlgoConfig) -> list[float]:
    """The advantage of each sample, neighbours in groups, from its reward less what `kl_reward` takes off."""
    assert batch.reference is not None
    assert batch.proximal is not None
    left = list(rewards)
    for t in range(len(batch.mask)):
        if batch.mask[t] and math.isfinite(batch.behaviour[t]):
            old = batch.proximal[t] if c.proximal == "recompute" else batch.behaviour[t]
            left[int(batch.sample[t])] -= c.kl_reward * estimate(batch.reference[t] - old, c.kl_reward_estimator).item()
    lengths = [sum(bool(m) for m in batch.mask[batch.sample == sample]) for sample in range(len(left))]
    advantages = []
    for first in range(0, len(left), group):
        of_group = left[first : first + group]
        deviation = {"population": statistics.pstdev, "sample": statistics.stdev, "none": None}[c.advantage.std]
        divisor = 1.0 if deviation is None else deviation(of_group) + c.advantage.eps
        leads = above_the_baseline(of_group, lengths[first : first + group], c.advantage.baseline)
        advantages += [lead / divisor for lead in leads]
    return advantages


def above_the_baseline(rewards: list[float], lengths: list[int], baseline: str) -> list[float]:
    """R - b of every answer of a group."""
    if baseline == "leave_one_out":
        return [reward - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, reward in enumerate(rewards)]
    if baseline == "best_alone":
        best, second = sorted(rewards, reverse=True)[:2]
        return [best - second if reward == best else 0.0 for reward in rewards]
    if baseline == "by_length":
        each_token = [reward for reward, length in zip(rewards, lengths, strict=True) for _ in range(length)]
        return [reward - statistics.fmean(each_token) for reward in rewards]
    return [reward - statistics.fmean(rewards) for reward in rewards]

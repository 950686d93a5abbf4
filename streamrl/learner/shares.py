"""What each data-parallel rank trains in a step, planned on rank 0: its micro batches, update by update.

batch ──advantages, rows──▶ [ranks][mini batches][micro batches], each mini batch with the counts of all ranks
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from streamrl.algo.advantages import group_advantages
from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.reward_penalty import Outcomes
from streamrl.config import Config
from streamrl.config.algo import AdvantageConfig
from streamrl.learner.group_ess import ends_of
from streamrl.learner.packing import MicroBatch, Packing, cut, plan_step
from streamrl.learner.reward_penalty import outcomes_of
from streamrl.types import Batch


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """What one data-parallel rank trains before one update."""

    micro_batches: list[MicroBatch]
    denominators: Denominators  # of all ranks


@dataclass(frozen=True, slots=True)
class Share:
    """What one data-parallel rank trains in a step, as rank 0 sends it."""

    step: int
    mini_batches: list[MiniBatch]
    outcomes: Outcomes | None = None  # of the whole step, where `algo.kl_reward` changes the advantages
    ends: np.ndarray | None = None  # of its groups (`group_ess.ends_of`), where `replay.reuse` asks for them

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [micro for mini in self.mini_batches for micro in mini.micro_batches]


def plan_shares(batch: Batch, config: Config, packing: Packing, mini_batches: int) -> list[Share]:
    """The share of every data-parallel rank. Raises SequenceTooLongError and ValueError, naming group and sample."""
    planned = plan_step(batch, batch_advantages(batch, config.algo.advantage), packing, mini_batches)
    denominators = [denominators_of(part) for part in cut(batch, mini_batches)]
    outcomes = outcomes_of(batch) if config.algo.kl_reward and not config.algo.advantage.has_critic else None
    return [
        Share(
            batch.step,
            [MiniBatch(rows, total) for rows, total in zip(of_rank, denominators, strict=True)],
            outcomes,
            ends_of(batch.groups) if config.replay.reuse > 1 else None,
        )
        for of_rank in zip(*planned, strict=True)
    ]


def denominators_of(batch: Batch) -> Denominators:
    """The counts of a batch that is trained in one update."""
    branches = [count for group in batch.groups for count in group.branches or (1,) * len(group.samples)]
    return Denominators.of((sample.loss_mask for sample in batch.samples), branches)


def batch_advantages(batch: Batch, config: AdvantageConfig) -> list[float]:
    """The group-relative advantage of every sample of a batch, in its order; 0 for placeholders.

    With a critic, which has advantages of tokens: the reward.
    """
    if config.has_critic:
        samples = (sample for group in batch.groups for sample in group.samples)
        return [0.0 if sample.is_placeholder else sample.reward for sample in samples]
    advantages: list[float] = []
    for group in batch.groups:
        rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
        valid = torch.tensor([not sample.is_placeholder for sample in group.samples])
        lengths = torch.tensor([np.count_nonzero(sample.loss_mask) for sample in group.samples])
        advantages += group_advantages(rewards, valid, config, lengths, group.branches).tolist()
    return advantages

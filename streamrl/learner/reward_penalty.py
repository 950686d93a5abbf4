"""KL in the reward over all data-parallel ranks: each rank has some of a step's answers, and every rank all rewards.

scores of this rank ──sum of each answer──▶ over the ranks ──▶ advantages of all ──▶ this rank's, by micro batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from streamrl.algo.reward_penalty import Outcomes, penalised_advantages, reward_kl
from streamrl.config.algo import AlgoConfig
from streamrl.learner.packing import MicroBatch
from streamrl.types import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Penalised:
    """What the penalty makes of the tokens of one micro batch."""

    advantages: Tensor  # float32 [N]
    reward_kl: Tensor  # float32 [N], nats


def outcomes_of(batch: Batch) -> Outcomes:
    """The outcomes of all samples of a batch, in its order."""
    samples = [sample for group in batch.groups for sample in group.samples]
    trained = np.array([np.count_nonzero(sample.loss_mask) for sample in samples], np.int64)
    return Outcomes(
        rewards=torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        valid=torch.tensor([not sample.is_placeholder for sample in samples]),
        first_place=torch.from_numpy(np.cumsum(trained) - trained),
        lengths=torch.from_numpy(trained),
        sizes=tuple(len(group.samples) for group in batch.groups),
        branches=tuple(group.branches for group in batch.groups),
    )


def of_groups(batch: Batch, taken_off: Sequence[float]) -> list[tuple[int, list[float]]]:
    """(group id, what each of its samples loses), of what all samples of a batch lose, in its order."""
    left = iter(taken_off)
    return [(group.group_id, [next(left) for _ in group.samples]) for group in batch.groups]


def penalise(
    micro_batches: Sequence[MicroBatch],
    old: Sequence[Tensor],
    reference: Sequence[Tensor],
    outcomes: Outcomes,
    config: AlgoConfig,
) -> tuple[list[Penalised], list[float]]:
    """What `algo.kl_reward` makes of each micro batch, and what it takes off the reward of each sample of the step.

    micro_batches: all of this rank and step; old, reference: float32 [N] of each, log pi_old and log pi_ref. Collective
    over the data-parallel group, on the ranks of the last pipeline stage.
    """
    device = old[0].device
    penalty = torch.zeros(len(outcomes.rewards), dtype=torch.float64, device=device)
    answers, divergences = [], []
    for micro, ours, theirs in zip(micro_batches, old, reference, strict=True):
        answers.append(outcomes.answer_of(torch.from_numpy(micro.place).to(device)))
        behaviour = torch.from_numpy(micro.behaviour).to(device)
        divergences.append(reward_kl(ours, theirs, behaviour, config))
        penalty.index_add_(0, answers[-1], divergences[-1].double())
    dist.all_reduce(penalty, group=parallel_state.get_data_parallel_group())
    penalty = outcomes.together(penalty)
    taken_off = (config.kl_reward * penalty).tolist()
    advantages = penalised_advantages(outcomes, penalty.cpu(), config).float().to(device)
    penalised = [
        Penalised(advantages=advantages[answer], reward_kl=divergence)
        for answer, divergence in zip(answers, divergences, strict=True)
    ]
    return penalised, taken_off

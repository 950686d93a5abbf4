"""What a critic's values make of the answers of a step: advantages and returns, over all data-parallel ranks.

values of this rank ──GAE of each answer──▶ moments over the ranks ──whiten──▶ advantages, by micro batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from streamrl.algo.gae import gae, moments, token_rewards, whiten
from streamrl.algo.reward_penalty import reward_kl
from streamrl.config.algo import AlgoConfig
from streamrl.learner.packing import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """What the tokens of one micro batch are worth by the weights that the step starts from."""

    advantages: Tensor  # float32 [N], whitened if `algo.advantage.whiten`
    values: Tensor  # float32 [N]
    returns: Tensor  # float64 [N], what the critic is trained on
    reward_kl: Tensor | None = None  # float32 [N], nats, with `algo.kl_reward`


def estimate(
    micro_batches: Sequence[MicroBatch],
    values: Sequence[Tensor],
    old: Sequence[Tensor],
    reference: Sequence[Tensor],
    config: AlgoConfig,
) -> list[Estimates]:
    """The estimates of each micro batch; its own `advantages` are the rewards of its answers.

    micro_batches: all of this rank and step; values, old, reference: float32 [N] of each, V, log pi_old and log pi_ref,
    the last two of no use without `algo.kl_reward`, which takes the divergence off the reward of each token. Collective
    over the data-parallel group, on the ranks of the last pipeline stage.
    """
    settings, made = config.advantage, []
    for micro, value, ours, theirs in zip(micro_batches, values, old, reference, strict=True):
        sample, rewards, behaviour = (
            torch.from_numpy(array).to(value.device) for array in (micro.sample, micro.advantages, micro.behaviour)
        )
        divergence = reward_kl(ours, theirs, behaviour, config) if config.kl_reward else None
        penalty = None if divergence is None else config.kl_reward * divergence
        rewards = token_rewards(rewards, sample, penalty)
        made.append((gae(rewards, value, sample, gamma=settings.gamma, lam=settings.lam), divergence))
    of_all = torch.stack([moments(advantages) for advantages, _ in made]).sum(0)
    dist.all_reduce(of_all, group=parallel_state.get_data_parallel_group())
    return [
        Estimates(
            advantages=(whiten(advantages, of_all) if settings.whiten else advantages).float(),
            values=value,
            returns=advantages + value.double(),
            reward_kl=divergence,
        )
        for (advantages, divergence), value in zip(made, values, strict=True)
    ]

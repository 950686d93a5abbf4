"""KL in the reward: what an answer loses for its distance to the reference policy, and the advantages that follow.

    log pi_old, log pi_ref ──estimator──▶ d of each token ──sum──▶ of each rollout ──R - beta d──▶ advantages

Decided once a step, before its first update, for all answers of the step: a group's answers may be on several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algo.advantages import group_advantages
from streamrl.algo.divergences import divergence_of
from streamrl.algo.ratios import bounded
from streamrl.config.algo import AlgoConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcomes:
    """The answers (samples) of a whole step, group by group, in the batch's order.

    Example: two groups of 2 answers with 3, 5, 0 (a placeholder) and 2 trained tokens have `sizes=(2, 2)`,
    `valid=[True, True, False, True]`, `lengths=[3, 5, 0, 2]` and `first_place=[0, 3, 8, 8]`.
    """

    rewards: Tensor  # float64 [S]
    valid: Tensor  # bool [S], False for placeholders
    first_place: Tensor  # int64 [S], `place` of the first trained token: those of the answer and of all after it
    lengths: Tensor  # int64 [S], trained tokens
    sizes: tuple[int, ...]  # answers of each group
    branches: tuple[tuple[int, ...], ...] = ()  # of each group, as `Group.branches`; (): no group has any

    def together(self, values: Tensor) -> Tensor:
        """What all branches of an answer's rollout have together: float64 [S]; values: float64 [S] of each answer."""
        if not any(self.branches):
            return values
        counts = [count for size, of in zip(self.sizes, self.branches, strict=True) for count in of or (1,) * size]
        repeats = torch.tensor(counts, device=values.device)
        rollout = torch.arange(len(counts), device=values.device).repeat_interleave(repeats)
        return values.new_zeros(len(counts)).index_add(0, rollout, values)[rollout]

    def answer_of(self, place: Tensor) -> Tensor:
        """Which answer a trained token is of: int64 [n] in 0..S-1. place: int64 [n]."""
        return torch.searchsorted(self.first_place.to(place.device), place, right=True) - 1


def reward_kl(old: Tensor, reference: Tensor, behaviour: Tensor, config: AlgoConfig) -> Tensor:
    """The estimate of KL(pi_old || pi_ref) of every token by `algo.kl_reward_estimator`: [n], without gradient.

    old, reference, behaviour: float [n], log pi_old, log pi_ref, log mu; a token that is dropped, as log mu is not
    finite, has 0.
    """
    difference = torch.where(behaviour.isfinite(), bounded(reference - old), 0.0)
    return divergence_of(config, "kl_reward_estimator").estimate(difference).detach()


def penalised_advantages(outcomes: Outcomes, penalty: Tensor, config: AlgoConfig) -> Tensor:
    """The group-relative advantages of `R - kl_reward penalty`: float64 [S].

    penalty: float64 [S], nats an answer; where it is one of several branches, nats of its rollout
    (`Outcomes.together`).
    """
    rewards = outcomes.rewards - config.kl_reward * penalty
    groups = zip(
        *(each.split(outcomes.sizes) for each in (rewards, outcomes.valid, outcomes.lengths)),
        outcomes.branches or ((),) * len(outcomes.sizes),
        strict=True,
    )
    return torch.cat(
        [group_advantages(reward, valid, config.advantage, lengths, of) for reward, valid, lengths, of in groups]
    )

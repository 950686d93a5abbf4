"""On-policy distillation: what a teacher says of the drawn tokens, as a part of their advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algo.ratios import bounded, log_ratio
from streamrl.config.algo import AlgoConfig


def reverse_kl(logprobs: Tensor, teacher: Tensor) -> Tensor:
    """`log pi - log pi_T` of every token: the k1 estimate of KL(pi || pi_T), [n] without gradient, of either sign.

    logprobs, teacher: float [n]. pi is the policy that is being optimised: where it has become the teacher, the
    estimate is 0 for every token, however stale, and nothing is left to learn. With mu in its place a stale token
    would go on to push. Source: Thinking Machines Lab, "On-Policy Distillation" (2025), there on-policy.
    """
    return log_ratio(logprobs.detach(), teacher)


def distilled_advantages(advantages: Tensor, divergence: Tensor, config: AlgoConfig) -> Tensor:
    """`A_t = A_i - delta d_t`, or `-delta d_t` where the rewards do not count: [n].

    advantages: float [n], of the group; divergence: `reverse_kl`, clamped to +-20 nats.
    """
    of_rewards = advantages if config.distillation.rewards else torch.zeros_like(advantages)
    return of_rewards - config.distillation.coefficient * bounded(divergence)

"""The clip of a ratio, and what families of the policy loss share."""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.algo.families.base import CLIPPED
from streamrl.config.algo import AlgoConfig

# log pi is clamped to +-1e6 nats where it is a factor itself: no model says less, and the product with the largest
# ratio and advantage stays finite in float32.
LOWEST_LOGPROB = 1e6


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """`min(r A, clip(r) A)`, for A < 0 not below c A: [n] with gradient, and which tokens were clipped, bool [n].

    Source: PPO (arXiv:1707.06347), clip-higher of DAPO (arXiv:2503.14476), dual clip (arXiv:1912.09729).
    """
    low, high = 1 - config.eps_low, 1 + config.eps_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    below_bound = nowhere(ratio)
    if config.dual_clip is not None:
        bound = config.dual_clip * advantages
        below_bound = (advantages < 0) & (surrogate < bound)
        surrogate = torch.where(below_bound, bound, surrogate)
    return surrogate, {
        "clip_low": (ratio < low) & (advantages < 0),
        "clip_high": (ratio > high) & (advantages > 0),
        "clip_dual": below_bound,
    }


def as_factor(logprobs: Tensor) -> Tensor:
    """log pi as a factor: bounded, so that its product with a ratio stays finite."""
    return logprobs.clamp(-LOWEST_LOGPROB, LOWEST_LOGPROB)


def not_clipped(like: Tensor) -> dict[str, Tensor]:
    """What a family without a clip says of n tokens."""
    return {name: nowhere(like) for name in CLIPPED}


def nowhere(like: Tensor) -> Tensor:
    """False for every token: bool [n]."""
    return torch.zeros_like(like, dtype=torch.bool)

"""The families of the policy loss: what stands beside the importance weight, `L = -w S`.

A family is a pure function of the tokens and of `log r = log pi - log pi_old`. To add one: write it here,
put it into `FAMILIES`, and name it in `AlgoConfig.loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algo.ratios import aggregate, bounded_exp
from streamrl.algo.tokens import TokenBatch
from streamrl.config.learner import AlgoConfig

Surrogate = Callable[[TokenBatch, Tensor, AlgoConfig], tuple[Tensor, dict[str, Tensor]]]
"""(tokens, log r [n] with gradient, config) -> (S [n] with gradient, which tokens were clipped, bool [n])."""

LOWEST_LOGPROB = 1e6
"""log pi is clamped to +-1e6 nats where it is a factor itself: no model says less, and the product with the largest
ratio and advantage stays finite in float32."""


@dataclass(frozen=True, slots=True)
class Family:
    """A surrogate, and whether `pi / pi_old` is in it.

    With the ratio, `proximal: behaviour` has corrected for the stale data already, and the importance weight
    divides that out again (w = f / q). Without, the weight is all the correction there is (w = f).
    """

    surrogate: Surrogate
    has_ratio: bool = True


def clip(tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """`min(r A, clip(r) A)` with r of the token. Source: PPO (arXiv:1707.06347)."""
    return clipped_surrogate(bounded_exp(log_r), tokens.advantages, config)


def gspo(tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The clip on the sample's ratio, the geometric mean of its tokens' r. Source: GSPO (arXiv:2507.18071).

    It moves far less than a token's ratio: the paper's clip range is 3e-4 and 4e-4.
    """
    ratio = bounded_exp(aggregate(log_r, tokens.sample, tokens.samples, "geometric"))
    return clipped_surrogate(ratio, tokens.advantages, config)


def cispo(tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """`sg(clip(r)) A log pi`: the ratio is clipped, no token loses its gradient. Source: MiniMax-M1
    (arXiv:2506.13585), which sets no lower edge: eps_low = 1."""
    ratio = bounded_exp(log_r.detach())
    low, high = 1 - config.eps_low, 1 + config.eps_high
    clipped = {"clip_low": ratio < low, "clip_high": ratio > high, "clip_dual": _nowhere(ratio)}
    return ratio.clamp(low, high) * tokens.advantages * _factor(tokens.logprobs), clipped


def sapo(tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """`(4 / tau) sigmoid(tau (r - 1)) A`, tau by the advantage's sign: a gate instead of a clip, of slope 1 at
    r = 1. Source: SAPO (arXiv:2511.20347)."""
    ratio = bounded_exp(log_r)
    temperature = torch.full_like(ratio, config.sapo_negative).masked_fill(tokens.advantages > 0, config.sapo_positive)
    gate = torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature)
    return gate * tokens.advantages, _not_clipped(ratio)


def reinforce(tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """`A log pi`: the importance weight f alone corrects. Source: REINFORCE (Williams 1992), truncated as in
    IMPALA (arXiv:1802.01561)."""
    return tokens.advantages * _factor(tokens.logprobs), _not_clipped(log_r)


FAMILIES: dict[str, Family] = {
    "clip": Family(clip),
    "cispo": Family(cispo),
    "gspo": Family(gspo),
    "sapo": Family(sapo),
    "reinforce": Family(reinforce, has_ratio=False),
}


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """`min(r A, clip(r) A)`, for A < 0 not below c A: [n] with gradient, and which tokens were clipped, bool [n].

    Source: PPO (arXiv:1707.06347), clip-higher of DAPO (arXiv:2503.14476), dual clip (arXiv:1912.09729).
    """
    low, high = 1 - config.eps_low, 1 + config.eps_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    below_bound = _nowhere(ratio)
    if config.dual_clip is not None:
        bound = config.dual_clip * advantages
        below_bound = (advantages < 0) & (surrogate < bound)
        surrogate = torch.where(below_bound, bound, surrogate)
    return surrogate, {
        "clip_low": (ratio < low) & (advantages < 0),
        "clip_high": (ratio > high) & (advantages > 0),
        "clip_dual": below_bound,
    }


def _factor(logprobs: Tensor) -> Tensor:
    return logprobs.clamp(-LOWEST_LOGPROB, LOWEST_LOGPROB)


def _not_clipped(like: Tensor) -> dict[str, Tensor]:
    return {name: _nowhere(like) for name in ("clip_low", "clip_high", "clip_dual")}


def _nowhere(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)

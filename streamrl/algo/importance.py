"""How far a token is off-policy and what its weight is: proximal policy, importance weight, mask, discount.

    log rho ──aggregate──▶ q ──f, C(s)──▶ weight ──mask──▶ 0 or weight ──discount──▶ w

All of it is without gradient: the gradient of the loss flows through the ratio pi / pi_old alone.
Tensors are flat over the n tokens that enter the loss; `sample` says which answer a token belongs to.
Every aggregate over a sample needs the whole sample: it may not be split over micro batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.config_learner import AlgoConfig

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 before exp: e^20 = 4.9e8 and its square stay finite in float32."""

MASK_EDGES = {"token": (0.5, 5.0), "sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}
"""Default edges of each mask: on rho of the token, its product and its geometric mean over the sample."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Weights:
    """What each of n tokens weighs in the loss, without gradient.

    Example: `proximal: behaviour`, `weight: token`, C = 2: a fresh token with pi / mu = 4 weighs
    min(4, 2) / 4 = 0.5.
    """

    weight: Tensor  # float [n], w: the truncated weight after mask and discount
    masked: Tensor  # bool [n], True where the mask set w to 0


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to +-LOG_RATIO_BOUND; beyond the bound the gradient is 0."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def log_ratio_to_behaviour(logprobs: Tensor, behaviour: Tensor) -> Tensor:
    """`log rho = sg(log pi - log mu)`: [n], finite for all finite inputs, not yet clamped to the bound."""
    largest = torch.finfo(logprobs.dtype).max
    return (logprobs.detach() - behaviour).clamp(-largest, largest)


def proximal_logprobs(behaviour: Tensor, log_rho: Tensor, staleness: Tensor, config: AlgoConfig) -> Tensor:
    """log pi_old: [n]. behaviour, log_rho: float [n], log mu and log pi - log mu; staleness: int64 [n].

    `behaviour`: mu itself. `interpolate`: `log mu + alpha log rho`, `alpha = s / (s + 1)`: a fresh token
    stays near the policy that generated it, an old one near the learner (decoupled PPO, arXiv:2110.00641,
    without its forward pass).
    """
    return behaviour + _proximal_log_ratio(log_rho, staleness, config)


def importance_weights(log_rho: Tensor, staleness: Tensor, sample: Tensor, samples: int, config: AlgoConfig) -> Weights:
    """The weight pipeline: `weight`, then `mask`, then `discount`.

    log_rho: float [n], from `log_ratio_to_behaviour`; staleness: int64 [n], learner steps; sample: int64 [n]
    in 0..samples-1.

    `proximal: behaviour`: w = f(q, s) / q, q from pi / mu: the clipped ratio has counted q already, so w is 1
    until f acts. `proximal: interpolate`: w = f(q, s), q from pi_old / mu. f(q, s) = min(q, C(s)), the
    truncation of IMPALA (arXiv:1802.01561); s is the token's staleness, the sample's where q is a product.
    """
    divides = config.proximal == "behaviour"
    log_correction = log_rho if divides else _proximal_log_ratio(log_rho, staleness, config)

    weight = torch.ones_like(log_rho)
    if config.weight != "none":
        ratio = bounded_exp(aggregate(log_correction, sample, samples, config.weight))
        age = staleness if config.weight == "token" else sample_staleness(staleness, sample, samples)
        truncated = torch.minimum(ratio, weight_cap(age, log_rho.dtype, config))
        weight = truncated / ratio if divides else truncated

    masked = torch.zeros_like(sample, dtype=torch.bool)
    if config.mask != "none":
        ratio = bounded_exp(aggregate(log_correction, sample, samples, config.mask))
        low, high = mask_edges(config)
        masked = (ratio < low) | (ratio > high)
        weight = weight.masked_fill(masked, 0.0)

    discount = torch.pow(config.discount, staleness.to(log_rho.dtype))
    return Weights(weight=weight * discount, masked=masked)


def aggregate(log_ratio: Tensor, sample: Tensor, samples: int, level: str) -> Tensor:
    """The log of q for every token: [n], dtype of the input, the same value for all tokens of a sample.

    level: `token` (the token's own ratio), `sequence` (product over the sample's tokens) or `geometric`
    (geometric mean over them). Summed in float64, so that the order of the tokens hardly matters.
    """
    if level == "token":
        return log_ratio
    total = torch.zeros(samples, dtype=torch.float64, device=log_ratio.device)
    total.index_add_(0, sample, log_ratio.double())
    if level == "geometric":
        total = total / torch.bincount(sample, minlength=samples).clamp(min=1)
    largest = torch.finfo(log_ratio.dtype).max
    return total.clamp(-largest, largest).to(log_ratio.dtype)[sample]


def sample_staleness(staleness: Tensor, sample: Tensor, samples: int) -> Tensor:
    """The staleness of every token's sample, the largest of its tokens: int64 [n]."""
    oldest = torch.zeros(samples, dtype=staleness.dtype, device=staleness.device)
    return oldest.scatter_reduce(0, sample, staleness, reduce="amax")[sample]


def weight_cap(staleness: Tensor, dtype: torch.dtype, config: AlgoConfig) -> Tensor:
    """`C(s) = 1 + (C - 1) gamma^s`: [n] of the given dtype."""
    return 1 + (config.weight_cap - 1) * torch.pow(config.weight_gamma, staleness.to(dtype))


def mask_edges(config: AlgoConfig) -> tuple[float, float]:
    """The interval that `config.mask` keeps, edges included: the configured ones or the rule's own."""
    low, high = MASK_EDGES[config.mask]
    return (
        low if config.mask_low is None else config.mask_low,
        high if config.mask_high is None else config.mask_high,
    )


def _proximal_log_ratio(log_rho: Tensor, staleness: Tensor, config: AlgoConfig) -> Tensor:
    """`log pi_old - log mu`: [n]."""
    if config.proximal == "behaviour":
        return torch.zeros_like(log_rho)
    age = staleness.to(log_rho.dtype)
    return age / (age + 1) * log_rho

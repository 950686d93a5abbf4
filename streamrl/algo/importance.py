"""How far a token is off-policy and what its weight is: importance weight, mask, discount.

    log ratio ──aggregate──▶ q ──f, C(s)──▶ weight ──mean of the step──▶ ──masks──▶ 0 or weight ──discount──▶ w

All of it is without gradient: the gradient of the loss flows through the family's surrogate alone.
Tensors are flat over the n tokens that enter the loss; `sample` says which answer a token belongs to.
Every aggregate over a sample needs the whole sample: it may not be split over micro batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algo.masks import mask_of
from streamrl.algo.proximals import proximal_of
from streamrl.algo.ratios import log_ratio
from streamrl.algo.regularisers import regulariser_of
from streamrl.algo.tokens import TokenBatch, needed
from streamrl.algo.weights import weight_of
from streamrl.config.algo import AlgoConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Weights:
    """What each of n tokens weighs in the loss, without gradient.

    Example: `proximal: behaviour`, `weight: token`, C = 2: a fresh token with pi / mu = 4 weighs
    min(4, 2) / 4 = 0.5.
    """

    weight: Tensor  # float [n], w: the truncated weight after mask and discount
    masked: Tensor  # bool [n], True where a mask set w to 0
    masked_by: dict[str, Tensor]  # bool [n] of each mask that is on, by its name


def importance_weights(
    tokens: TokenBatch,
    log_rho: Tensor,
    proximal: Tensor,
    config: AlgoConfig,
    *,
    has_ratio: bool = True,
    needs_cap: bool = True,
) -> Weights:
    """The weight pipeline: `weight`, its mean of the step where it is normalised, then the masks, then `discount`.

    log_rho: float [n], log pi - log mu; proximal: float [n], log pi_old; has_ratio, needs_cap: whether the family's
    surrogate contains pi / pi_old, and grows with that of the token (`families/base.py`). Of the tokens, staleness,
    samples and selections are read.

    `proximal: behaviour`: q is of pi / mu, and w = f(q, s) / q where the family has counted q already, so
    that w is 1 until f acts, and 1 throughout where nothing is to be capped. The other proximal policies:
    w = f(q, s), q of pi_old / mu. f(q, s) = min(q, C(s)), the truncation of IMPALA (arXiv:1802.01561); s is the
    token's staleness, the sample's where q is a product.
    """
    of_policy = proximal_of(config).of_policy
    log_correction = log_rho if of_policy else log_ratio(proximal, tokens.behaviour)
    ratio, weight = weight_of(config).factors(tokens, log_correction, config, of_policy=of_policy)
    if of_policy and has_ratio:
        weight = weight / ratio if needs_cap else torch.ones_like(ratio)
    if config.weight_normalise:
        weight = weight / needed(tokens.mean_weight, "mean_weight", "algo.weight_normalise=true")

    masked_by = _masks(tokens, log_correction, config)
    masked = torch.zeros_like(tokens.mask)
    for rule in masked_by.values():
        masked = masked | rule
    weight = weight.masked_fill(masked, 0.0)

    discount = torch.pow(config.discount, tokens.staleness.to(log_rho.dtype))
    return Weights(weight=weight * discount, masked=masked, masked_by=masked_by)


def weight_sums(batch: TokenBatch, config: AlgoConfig) -> Tensor:
    """What `algo.weight_normalise` divides by, as a sum and a count: float64 [2], added over micro batches and ranks.

    The weights are those under the weights that the step starts from, before masks and discount, of the trained tokens
    whose mu is finite; one that a sample has as a whole counts once a sample. Raises ValueError without
    `batch.proximal`.
    """
    scores = needed(batch.proximal, "proximal", "algo.weight_normalise=true")
    index = (batch.mask & batch.behaviour.isfinite()).nonzero().squeeze(-1)
    tokens = batch.select(index)
    weight_choice = weight_of(config)
    with torch.no_grad():
        log_correction = log_ratio(scores[index], tokens.behaviour)
        _, weight = weight_choice.factors(tokens, log_correction, config, of_policy=False)
        counts = torch.ones_like(weight, dtype=torch.float64)
        if weight_choice.of_sample:
            counts = counts / torch.bincount(tokens.sample, minlength=tokens.samples)[tokens.sample]
        return torch.stack([(weight.double() * counts).sum(), counts.sum()])


def weight_cap(staleness: Tensor, dtype: torch.dtype, config: AlgoConfig) -> Tensor:
    """`C(s) = 1 + (C - 1) gamma^s`: [n] of the given dtype."""
    return 1 + (config.weight_cap - 1) * torch.pow(config.weight_gamma, staleness.to(dtype))


def truncated(ratio: Tensor, staleness: Tensor, config: AlgoConfig) -> Tensor:
    """f(q, s) = min(q, C(s)): [n]. Source: IMPALA (arXiv:1802.01561)."""
    return torch.minimum(ratio, weight_cap(staleness, ratio.dtype, config))


def mask_edges(config: AlgoConfig) -> tuple[float, float]:
    """The interval that `config.mask` keeps, edges included: the configured ones or the rule's own."""
    low, high = config.chosen("mask").edges
    return (
        low if config.mask_low is None else config.mask_low,
        high if config.mask_high is None else config.mask_high,
    )


def _masks(tokens: TokenBatch, log_correction: Tensor, config: AlgoConfig) -> dict[str, Tensor]:
    """Which tokens each mask that is on takes away: bool [n]."""
    masks: dict[str, Tensor] = {}
    for rule in config.mask_chain:
        mask = mask_of(rule)
        if not mask.acts:
            continue
        if mask.whole_step:
            taken = needed(tokens.outliers, "outliers", f"algo.mask={rule.mask}")
        else:
            taken = mask.masked(tokens, log_correction, rule)
        masks[mask.label] = taken | masks[mask.label] if mask.label in masks else taken
    regulariser = regulariser_of(config)
    if regulariser.acts:
        picked = needed(tokens.covariant, "covariant", f"algo.covariance={config.covariance}")
        if (masked := regulariser.mask(picked)) is not None:
            masks[regulariser.label] = masked
    return masks

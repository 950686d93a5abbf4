"""The policy loss of one micro batch: the family's surrogate times the weight, KL divergence, entropy bonus.

A micro batch's loss is its own sum over global counts, so that the sum over micro batches and ranks is
the loss of the update, whatever the packing and the layout.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from streamrl.algo.aggregations import aggregation_of
from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.diagnostics import PENALISED_BY, REWARD_KL, bucket_sums, off_policy_values, weight_values
from streamrl.algo.distillation import distilled_advantages, reverse_kl
from streamrl.algo.divergences import divergence_of
from streamrl.algo.families import family_of
from streamrl.algo.importance import importance_weights
from streamrl.algo.proximals import proximal_of
from streamrl.algo.ratios import bounded, log_ratio
from streamrl.algo.regularisers import regulariser_of
from streamrl.algo.tokens import TokenBatch, needed
from streamrl.config.algo import AlgoConfig


def policy_loss(batch: TokenBatch, config: AlgoConfig, denominators: Denominators) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro batch's part of the loss, a scalar to call backward on, and its sums for `diagnostics.finish`.

    `L_t = -w S + beta D(pi || pi_ref) + R - lambda H`, S of the family `config.loss`, D by `config.kl_estimator`, R of
    the regulariser `config.covariance` and of `config.ratio_penalty`, summed with each token's share of the mean. A
    teacher has its part in the advantages of S. A token that a mask zeroes keeps its other terms; a token whose mu is
    not finite has none. Parts of one update are added, never averaged. A batch without a trained token gives 0 with
    zero gradients, so that no rank falls out of step.

    Raises ValueError if a setting needs a field that the batch does not have, naming both.
    """
    usable = batch.mask & batch.behaviour.isfinite()
    # Selecting, rather than multiplying by 0, keeps whatever the other tokens hold out of the gradient.
    index = usable.nonzero().squeeze(-1)
    tokens, taught = _taught(batch.select(index), config)
    share = aggregation_of(config).shares(batch, config, denominators)[index]
    family = family_of(config)

    with torch.no_grad():
        log_rho = log_ratio(tokens.logprobs.detach(), tokens.behaviour)
        proximal = proximal_of(config).logprobs(tokens.behaviour, log_rho, tokens.staleness, tokens.proximal)
        applied = importance_weights(
            tokens, log_rho, proximal, config, has_ratio=family.has_ratio, needs_cap=family.needs_cap
        )
    log_r = log_ratio(tokens.logprobs, proximal)
    surrogate, clipped = family.surrogate(tokens, log_r, config)
    further, values = _further_terms(tokens, log_r, config)
    loss = share * (-applied.weight * surrogate + further)

    values |= {"measured": tokens.mask, "loss": loss.detach(), **clipped, **taught}
    values |= off_policy_values(log_rho) | weight_values(applied)
    sums = bucket_sums(values, tokens.staleness)
    sums |= bucket_sums({"trained": batch.mask, "dropped": batch.mask & ~usable}, batch.staleness)
    return loss.sum(), sums


def reference_kl(logprobs: Tensor, reference: Tensor, config: AlgoConfig) -> Tensor:
    """The estimate of KL(pi || pi_ref) of every token by `algo.kl_estimator`: [n] with gradient.

    d = log pi_ref - log pi is clamped to +-20, so that a token beyond it pulls in no direction, rather than the wrong
    one. `algo.kl_straight_through`: the value of the estimate with the gradient of k2.
    """
    difference = bounded(reference - logprobs)
    estimate = divergence_of(config).estimate(difference)
    if not config.kl_straight_through:
        return estimate
    squares = difference.square() / 2
    return squares - squares.detach() + estimate.detach()


def _taught(tokens: TokenBatch, config: AlgoConfig) -> tuple[TokenBatch, dict[str, Tensor]]:
    """The tokens with the teacher's part in their advantages, and the per-token values of it."""
    if not config.distils:
        return tokens, {}
    setting = f"algo.distillation.teacher={config.distillation.teacher}"
    divergence = reverse_kl(tokens.logprobs, needed(tokens.teacher, "teacher", setting))
    advantages = distilled_advantages(tokens.advantages, divergence, config)
    return replace(tokens, advantages=advantages), {"distillation_kl": divergence}


def _further_terms(tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """What is added to `-w S`: [n] with gradient; and the per-token values of it, without their weights."""
    terms = torch.zeros_like(log_r)
    values = {}
    regulariser = regulariser_of(config)
    if regulariser.acts:
        picked = needed(tokens.covariant, "covariant", f"algo.covariance={config.covariance}")
        if (penalty := regulariser.penalty(picked, log_r, config)) is not None:
            terms = terms + penalty
            values[PENALISED_BY + regulariser.label] = picked
    if config.ratio_penalty != 0:
        squares = bounded(log_r).square()
        terms = terms + config.ratio_penalty * squares
        values["ratio_penalty"] = squares.detach()
    if config.kl != 0:
        if divergence_of(config).of_vocabulary:
            kl = needed(tokens.full_kl, "full_kl", f"algo.kl_estimator={config.kl_estimator}")
        else:
            kl = reference_kl(tokens.logprobs, needed(tokens.reference, "reference", f"algo.kl={config.kl:g}"), config)
        terms = terms + config.kl * kl
        values["kl"] = kl.detach()
    if tokens.reward_kl is not None:
        values[REWARD_KL] = tokens.reward_kl
    if config.entropy != 0:
        terms = terms - config.entropy * needed(tokens.entropy, "entropy", f"algo.entropy={config.entropy:g}")
    if tokens.entropy is not None:
        values["entropy"] = tokens.entropy.detach()
    return terms, values

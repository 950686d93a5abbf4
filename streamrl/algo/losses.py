"""The policy loss of one micro batch: asymmetric clip, dual clip, entropy bonus, and how tokens are averaged.

A micro batch's loss is its own sum over global counts, so that the sum over micro batches and ranks is
the loss of the step, whatever the packing and the layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamrl.algo.diagnostics import bucket_sums, off_policy_values, weight_values
from streamrl.algo.importance import bounded_exp, importance_weights, log_ratio_to_behaviour, proximal_logprobs
from streamrl.config_learner import AlgoConfig


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenBatch:
    """The N output tokens of one micro batch, flat, in any order. Samples are whole.

    Example: two answers of 2 and 1 tokens have `sample=[0, 0, 1]`, `samples=2`, and the advantage of an
    answer stands beside each of its tokens. Raises ValueError, naming the field, if shapes or dtypes do not fit.
    """

    logprobs: Tensor  # float32 or float64 [N], log pi, with gradient
    entropy: Tensor | None  # like logprobs, entropy of pi in nats; None: not measured
    behaviour: Tensor  # like logprobs, log mu; a token where it is not finite is dropped and counted
    advantages: Tensor  # like logprobs
    mask: Tensor  # bool [N], True for trained tokens; the others change nothing, whatever they hold
    staleness: Tensor  # int64 [N], >= 0, learner steps
    sample: Tensor  # int64 [N], which sample a token belongs to, 0..samples-1
    samples: int

    def __post_init__(self) -> None:
        dtype = self.logprobs.dtype
        if dtype not in (torch.float32, torch.float64) or self.logprobs.ndim != 1:
            raise ValueError(f"logprobs is {dtype} {list(self.logprobs.shape)}, float32 or float64 [N] is needed")
        expected = {"behaviour": dtype, "advantages": dtype, "mask": torch.bool}
        expected |= {"staleness": torch.int64, "sample": torch.int64}
        if self.entropy is not None:
            expected["entropy"] = dtype
        for name, needed in expected.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype != needed or tensor.shape != self.logprobs.shape:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}, {needed} {list(self.logprobs.shape)} is needed"
                )

    def select(self, index: Tensor) -> TokenBatch:
        """The tokens at `index`, int64 [n], with the same sample numbers."""
        return TokenBatch(
            logprobs=self.logprobs[index],
            entropy=None if self.entropy is None else self.entropy[index],
            behaviour=self.behaviour[index],
            advantages=self.advantages[index],
            mask=self.mask[index],
            staleness=self.staleness[index],
            sample=self.sample[index],
            samples=self.samples,
        )


@dataclass(frozen=True, slots=True)
class Denominators:
    """The counts of the whole step, over all micro batches and data-parallel ranks.

    Tokens that an importance mask zeroes and tokens that are dropped because mu is not finite are trained
    tokens and count. Example: answers with masks 110 and 00 (a placeholder) give `Denominators(2, 1)`.
    """

    tokens: int  # trained tokens (loss mask True)
    samples: int  # samples with at least one trained token

    @classmethod
    def of(cls, loss_masks: Iterable[Tensor | np.ndarray]) -> Denominators:
        """Count the loss masks (bool [T], torch or numpy) of all samples of a step."""
        trained = [int(mask.sum()) for mask in loss_masks]
        return cls(tokens=sum(trained), samples=sum(count > 0 for count in trained))


def policy_loss(batch: TokenBatch, config: AlgoConfig, denominators: Denominators) -> tuple[Tensor, dict[str, Tensor]]:
    """The micro batch's part of the loss, a scalar to call backward on, and its sums for `diagnostics.finish`.

    `L_t = -w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) - lambda H`, r = pi / pi_old, summed with each
    token's share of the mean. A token that the importance mask zeroes keeps its entropy term; a token whose
    mu is not finite has none. Parts of one step are added, never averaged. A batch without a trained token
    gives 0 with zero gradients, so that no rank falls out of step.

    Raises ValueError if `config.entropy` is not 0 and the batch has no entropy.
    """
    usable = batch.mask & batch.behaviour.isfinite()
    # Selecting, rather than multiplying by 0, keeps whatever the other tokens hold out of the gradient.
    index = usable.nonzero().squeeze(-1)
    tokens = batch.select(index)
    share = token_shares(batch, config, denominators)[index]

    with torch.no_grad():
        log_rho = log_ratio_to_behaviour(tokens.logprobs, tokens.behaviour)
        proximal = proximal_logprobs(tokens.behaviour, log_rho, tokens.staleness, config)
        applied = importance_weights(log_rho, tokens.staleness, tokens.sample, tokens.samples, config)
    ratio = bounded_exp(tokens.logprobs - proximal)
    surrogate, clipped = clipped_surrogate(ratio, tokens.advantages, config)
    loss = -applied.weight * surrogate
    values: dict[str, Tensor] = {}
    if tokens.entropy is not None:
        values["entropy"] = tokens.entropy.detach()
        if config.entropy != 0:
            loss = loss - config.entropy * tokens.entropy
    elif config.entropy != 0:
        raise ValueError(f"entropy is None, algo.entropy={config.entropy:g} needs it")
    loss = share * loss

    values |= {"measured": tokens.mask, "loss": loss.detach(), **clipped}
    values |= off_policy_values(log_rho) | weight_values(applied, config.mask)
    sums = bucket_sums(values, tokens.staleness)
    sums |= bucket_sums({"trained": batch.mask, "dropped": batch.mask & ~usable}, batch.staleness)
    return loss.sum(), sums


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """`min(r A, clip(r) A)`, for A < 0 not below c A: [n] with gradient, and which tokens were clipped, bool [n].

    Source: PPO (arXiv:1707.06347), clip-higher of DAPO (arXiv:2503.14476), dual clip (arXiv:1912.09729).
    """
    low, high = 1 - config.eps_low, 1 + config.eps_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    below_bound = torch.zeros_like(advantages, dtype=torch.bool)
    if config.dual_clip is not None:
        bound = config.dual_clip * advantages
        below_bound = (advantages < 0) & (surrogate < bound)
        surrogate = torch.where(below_bound, bound, surrogate)
    return surrogate, {
        "clip_low": (ratio < low) & (advantages < 0),
        "clip_high": (ratio > high) & (advantages > 0),
        "clip_dual": below_bound,
    }


def token_shares(batch: TokenBatch, config: AlgoConfig, denominators: Denominators) -> Tensor:
    """What each token counts in the mean over the step: [N], dtype of the log-probs; any value off the mask.

    `token_mean`: 1 / tokens. `sequence_mean`: 1 / (samples x trained tokens of its sample).
    `sequence_sum_norm`: 1 / (samples x norm_length).
    """
    ones = torch.ones_like(batch.behaviour)
    if config.aggregation == "token_mean":
        return ones / max(denominators.tokens, 1)
    if config.aggregation == "sequence_mean":
        lengths = ones.new_zeros(batch.samples).index_add_(0, batch.sample, batch.mask.to(ones.dtype))
        return ones / (lengths.clamp(min=1)[batch.sample] * max(denominators.samples, 1))
    if config.norm_length is None:
        raise ValueError("norm_length is None, algo.aggregation=sequence_sum_norm needs it")
    return ones / (config.norm_length * max(denominators.samples, 1))

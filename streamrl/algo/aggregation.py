"""How the tokens of a step are averaged: what each of them counts, and over which global counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from streamrl.algo.tokens import TokenBatch
from streamrl.config.learner import AlgoConfig


@dataclass(frozen=True, slots=True)
class Denominators:
    """The counts of one update, over all its micro batches and data-parallel ranks.

    With one mini batch an update is the whole step. Tokens that an importance mask zeroes and tokens that are
    dropped because mu is not finite are trained tokens and count. Example: answers with masks 110 and 00 (a
    placeholder) give `Denominators(2, 1)`.
    """

    tokens: int  # trained tokens (loss mask True)
    samples: int  # samples with at least one trained token

    @classmethod
    def of(cls, loss_masks: Iterable[Tensor | np.ndarray]) -> Denominators:
        """Count the loss masks (bool [T], torch or numpy) of all samples of an update."""
        trained = [int(mask.sum()) for mask in loss_masks]
        return cls(tokens=sum(trained), samples=sum(count > 0 for count in trained))


def token_shares(batch: TokenBatch, config: AlgoConfig, denominators: Denominators) -> Tensor:
    """What each token counts in the mean over the update: [N], dtype of the log-probs; any value off the mask.

    `token_mean`: 1 / tokens. `sequence_mean`: 1 / (samples x trained tokens of its sample).
    `sequence_sum_norm`: 1 / (samples x norm_length). Raises ValueError where that length is not given.
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

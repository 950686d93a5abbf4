"""The mean over rollouts of the means of their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.aggregations.base import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.aggregations.base import Denominators
    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class SequenceMean(Aggregation):
    """1 / (rollouts of the update x trained tokens of the token's rollout, those of all its branches)."""

    def shares(self, batch: TokenBatch, config: AlgoConfig, denominators: Denominators) -> Tensor:
        import torch

        ones = torch.ones_like(batch.behaviour)
        if batch.rollout_tokens is None:
            sums = ones.new_zeros(batch.samples).index_add_(0, batch.sample, batch.mask.to(ones.dtype))
            lengths = sums[batch.sample]
        else:  # some branches may be in other micro batches
            lengths = batch.rollout_tokens.to(ones.dtype)
        return ones / (lengths.clamp(min=1) * max(denominators.rollouts, 1))

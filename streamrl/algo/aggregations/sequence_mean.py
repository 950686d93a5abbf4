"""The mean over samples of their means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.aggregations.base import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.aggregations.base import Denominators
    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class SequenceMean(Aggregation):
    """1 / (samples of the update x trained tokens of the token's sample)."""

    def shares(self, batch: TokenBatch, config: AlgoConfig, denominators: Denominators) -> Tensor:
        import torch

        ones = torch.ones_like(batch.behaviour)
        lengths = ones.new_zeros(batch.samples).index_add_(0, batch.sample, batch.mask.to(ones.dtype))
        return ones / (lengths.clamp(min=1)[batch.sample] * max(denominators.samples, 1))

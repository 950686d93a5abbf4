"""The sum over tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.aggregations.base import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.aggregations.base import Denominators
    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class TokenSum(Aggregation):
    """1: the sum over the trained tokens of the update."""

    def shares(self, batch: TokenBatch, config: AlgoConfig, denominators: Denominators) -> Tensor:
        import torch

        return torch.ones_like(batch.behaviour)

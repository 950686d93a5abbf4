"""The mean over rollouts of their sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.aggregations.base import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.aggregations.base import Denominators
    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class SequenceSum(Aggregation):
    """1 / rollouts of the update."""

    def shares(self, batch: TokenBatch, config: AlgoConfig, denominators: Denominators) -> Tensor:
        import torch

        return torch.ones_like(batch.behaviour) / max(denominators.rollouts, 1)

"""The mean over rollouts of their sums, divided by one length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.aggregations.base import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.aggregations.base import Denominators
    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class SequenceSumNorm(Aggregation):
    """1 / (rollouts of the update x `algo.norm_length`)."""

    uses = frozenset({"norm_length"})

    @classmethod
    def check(cls, section: AlgoConfig) -> None:
        if section.norm_length is None:
            raise ValueError(f"norm_length: a length in tokens is needed by aggregation={section.aggregation}")

    def shares(self, batch: TokenBatch, config: AlgoConfig, denominators: Denominators) -> Tensor:
        import torch

        assert config.norm_length is not None
        return torch.ones_like(batch.behaviour) / (config.norm_length * max(denominators.rollouts, 1))

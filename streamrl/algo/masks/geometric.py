"""Samples by the geometric mean of their ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks.base import Mask, outside

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class GeometricMask(Mask):
    """Samples whose tokens' ratios have a geometric mean outside of the edges."""

    uses = frozenset({"mask_low", "mask_high"})
    edges = (0.99, 1.01)
    label = "geometric"

    def masked(self, tokens: TokenBatch, log_correction: Tensor, config: AlgoConfig) -> Tensor:
        from streamrl.algo.ratios import geometric_mean

        return outside(geometric_mean(log_correction, tokens.sample, tokens.samples), config)

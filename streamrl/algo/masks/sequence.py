"""Samples by the product of their ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks.base import Mask, outside

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class SequenceMask(Mask):
    """Samples whose ratio, the product over their tokens, is outside of the edges."""

    uses = frozenset({"mask_low", "mask_high"})
    edges = (0.5, 2.0)
    label = "sequence"

    def masked(self, tokens: TokenBatch, log_correction: Tensor, config: AlgoConfig) -> Tensor:
        from streamrl.algo.ratios import product

        return outside(product(log_correction, tokens.sample, tokens.samples), config)

"""Tokens by their own ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks.base import Mask, outside

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class TokenMask(Mask):
    """Tokens whose own ratio is outside of the edges."""

    uses = frozenset({"mask_low", "mask_high"})
    edges = (0.5, 5.0)
    label = "token"

    def masked(self, tokens: TokenBatch, log_correction: Tensor, config: AlgoConfig) -> Tensor:
        return outside(log_correction, config)

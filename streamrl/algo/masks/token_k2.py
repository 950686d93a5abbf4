"""Tokens by their k2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks._divergence import DivergenceMask, k2

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch


class TokenK2(DivergenceMask):
    """Tokens whose k2 is above `mask_high`."""

    label = "token_k2"

    def distance(self, difference: Tensor, tokens: TokenBatch) -> Tensor:
        return k2(difference)

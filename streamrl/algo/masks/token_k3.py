"""Tokens by their k3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks._divergence import DivergenceMask, k3

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch


class TokenK3(DivergenceMask):
    """Tokens whose k3 is above `mask_high`."""

    label = "token_k3"

    def distance(self, difference: Tensor, tokens: TokenBatch) -> Tensor:
        return k3(difference)

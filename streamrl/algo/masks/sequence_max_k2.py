"""Samples by the largest k2 of their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks._divergence import DivergenceMask, k2

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch


class SequenceMaxK2(DivergenceMask):
    """Samples of which one token's k2 is above `mask_high`."""

    label = "sequence_max_k2"

    def distance(self, difference: Tensor, tokens: TokenBatch) -> Tensor:
        from streamrl.algo.ratios import sample_max

        return sample_max(k2(difference), tokens.sample, tokens.samples)

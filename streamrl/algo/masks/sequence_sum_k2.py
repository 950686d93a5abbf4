"""Samples by the sum of their tokens' k2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks._divergence import DivergenceMask, k2

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch


class SequenceSumK2(DivergenceMask):
    """Samples whose k2, summed over their tokens, is above `mask_high`."""

    label = "sequence_sum_k2"

    def distance(self, difference: Tensor, tokens: TokenBatch) -> Tensor:
        from streamrl.algo.ratios import sample_sum

        return sample_sum(k2(difference), tokens.sample, tokens.samples)

"""Samples by the sum of their tokens' k3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks._divergence import DivergenceMask, k3

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch


class SequenceSumK3(DivergenceMask):
    """Samples whose k3, summed over their tokens, is above `mask_high`."""

    label = "sequence_sum_k3"

    def distance(self, difference: Tensor, tokens: TokenBatch) -> Tensor:
        from streamrl.algo.ratios import sample_sum

        return sample_sum(k3(difference), tokens.sample, tokens.samples)

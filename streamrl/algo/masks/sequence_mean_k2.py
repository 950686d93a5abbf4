"""Samples by the mean of their tokens' k2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks._divergence import DivergenceMask, k2

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch


class SequenceMeanK2(DivergenceMask):
    """Samples whose k2, the mean over their tokens, is above `mask_high`."""

    label = "sequence_mean_k2"

    def distance(self, difference: Tensor, tokens: TokenBatch) -> Tensor:
        from streamrl.algo.ratios import sample_mean

        return sample_mean(k2(difference), tokens.sample, tokens.samples)

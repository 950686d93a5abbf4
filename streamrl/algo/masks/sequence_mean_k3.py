"""Samples by the mean of their tokens' k3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks._divergence import DivergenceMask, k3

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch


class SequenceMeanK3(DivergenceMask):
    """Samples whose k3, the mean over their tokens, is above `mask_high`."""

    label = "sequence_mean_k3"

    def distance(self, difference: Tensor, tokens: TokenBatch) -> Tensor:
        from streamrl.algo.ratios import sample_mean

        return sample_mean(k3(difference), tokens.sample, tokens.samples)

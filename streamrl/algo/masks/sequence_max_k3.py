"""Samples by the largest k3 of their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks._divergence import DivergenceMask, k3

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch


class SequenceMaxK3(DivergenceMask):
    """Samples of which one token's k3 is above `mask_high`."""

    label = "sequence_max_k3"

    def distance(self, difference: Tensor, tokens: TokenBatch) -> Tensor:
        from streamrl.algo.ratios import sample_max

        return sample_max(k3(difference), tokens.sample, tokens.samples)

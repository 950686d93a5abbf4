"""Cross entropy as a family of the policy loss: what `streamrl sft` trains rows with.

No choice of `algo.loss` by name: with answers of generators it would train wrong ones like right ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families.base import Family

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class CrossEntropy(Family):
    """`log pi`: with weight 1 and the mean over tokens, L is the cross entropy of the trained tokens, in nats."""

    has_ratio = False
    of_rows = True

    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        from streamrl.algo.clipping import as_factor, not_clipped

        return as_factor(tokens.logprobs), not_clipped(log_r)

"""The plain policy gradient (REINFORCE, Williams 1992)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families.base import Family

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Reinforce(Family):
    """`A log pi`: the importance weight f alone corrects.

    Source: REINFORCE (Williams 1992), truncated as in IMPALA (arXiv:1802.01561).
    """

    has_ratio = False

    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        from streamrl.algo.clipping import as_factor, not_clipped

        return tokens.advantages * as_factor(tokens.logprobs), not_clipped(log_r)

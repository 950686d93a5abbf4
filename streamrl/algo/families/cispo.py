"""The clipped ratio as a weight (CISPO of MiniMax-M1, arXiv:2506.13585)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families.base import Family

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Cispo(Family):
    """`sg(clip(r)) A log pi`: the ratio is clipped, no token loses its gradient. Source: MiniMax-M1 (arXiv:2506.13585).

    It sets no lower edge: eps_low = 1.
    """

    needs_cap = False
    uses = frozenset({"eps_low", "eps_high"})
    stops = frozenset()

    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        from streamrl.algo.clipping import as_factor, nowhere
        from streamrl.algo.ratios import bounded_exp

        ratio = bounded_exp(log_r.detach())
        low, high = 1 - config.eps_low, 1 + config.eps_high
        clipped = {"clip_low": ratio < low, "clip_high": ratio > high, "clip_dual": nowhere(ratio)}
        return ratio.clamp(low, high) * tokens.advantages * as_factor(tokens.logprobs), clipped

"""PPO's clip of every token's ratio (arXiv:1707.06347)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families.base import Family

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Clip(Family):
    """`min(r A, clip(r) A)` with r of the token. Source: PPO (arXiv:1707.06347)."""

    uses = frozenset({"eps_low", "eps_high", "dual_clip"})

    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        from streamrl.algo.clipping import clipped_surrogate
        from streamrl.algo.ratios import bounded_exp

        return clipped_surrogate(bounded_exp(log_r), tokens.advantages, config)

    def stopped(self, log_r: Tensor, advantages: Tensor, config: AlgoConfig) -> Tensor:
        from streamrl.algo.clipping import clipped_surrogate
        from streamrl.algo.ratios import bounded_exp

        _, clipped = clipped_surrogate(bounded_exp(log_r), advantages, config)
        return clipped["clip_low"] | clipped["clip_high"] | clipped["clip_dual"]

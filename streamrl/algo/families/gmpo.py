"""The geometric mean of clipped ratios (GMPO, arXiv:2507.20673)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families.base import Family

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Gmpo(Family):
    """`A exp(mean of the sample's clipped log r)`: each token's log-ratio is clipped, to -eps_low..eps_high.

    Source: GMPO (arXiv:2507.20673), whose range is 0.4 and 0.4. As in PPO the clip acts where a ratio has gone the way
    of the advantage: above for A > 0, below for A < 0.
    """

    needs_cap = False
    uses = frozenset({"eps_low", "eps_high"})

    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from streamrl.algo.clipping import nowhere
        from streamrl.algo.ratios import bounded, bounded_exp, geometric_mean

        above, below = self._beyond(log_r, tokens.advantages, config)
        kept = torch.where(above, config.eps_high, torch.where(below, -config.eps_low, bounded(log_r)))
        ratio = bounded_exp(geometric_mean(kept, tokens.sample, tokens.samples))
        return ratio * tokens.advantages, {"clip_low": below, "clip_high": above, "clip_dual": nowhere(ratio)}

    def stopped(self, log_r: Tensor, advantages: Tensor, config: AlgoConfig) -> Tensor:
        above, below = self._beyond(log_r, advantages, config)
        return above | below

    def _beyond(self, log_r: Tensor, advantages: Tensor, config: AlgoConfig) -> tuple[Tensor, Tensor]:
        """Which tokens are clipped, above and below: bool [n] each."""
        return (log_r > config.eps_high) & (advantages > 0), (log_r < -config.eps_low) & (advantages < 0)

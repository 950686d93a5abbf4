"""What the families of DPPO (arXiv:2602.04879) share: the mask of a divergence in the place of the clip of a ratio."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from streamrl.algo.families.base import Family

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Dppo(Family):
    """`sg(min(r, c)) A log pi`, and 0 where pi has gone too far the way of the advantage.

    How far is a divergence between "this token" and "another one" under pi and under pi_old: more than eps_high up
    where A > 0, more than eps_low down where A < 0. c = algo.ratio_cap.
    """

    needs_cap = False
    uses = frozenset({"eps_low", "eps_high", "ratio_cap"})
    stops = frozenset({"clip_low", "clip_high"})

    @abstractmethod
    def distance(self, logprobs: Tensor, old: Tensor) -> Tensor:
        """How far apart the policies are: float [n], >= 0, finite. logprobs, old: float [n], log pi and log pi_old."""

    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from streamrl.algo.clipping import as_factor
        from streamrl.algo.ratios import bounded_exp

        above, below = self._beyond(tokens.logprobs, log_r, tokens.advantages, config)
        ratio = bounded_exp(log_r.detach())
        capped = (ratio > config.ratio_cap) & ~above & ~below
        surrogate = ratio.clamp(max=config.ratio_cap) * tokens.advantages * as_factor(tokens.logprobs)
        kept = torch.where(above | below, 0.0, surrogate)
        return kept, {"clip_low": below, "clip_high": above, "clip_dual": capped}

    def _beyond(self, logprobs: Tensor, log_r: Tensor, advantages: Tensor, config: AlgoConfig) -> tuple[Tensor, Tensor]:
        """Which tokens lose their gradient, above and below: bool [n] each."""
        logprobs, log_r = logprobs.detach(), log_r.detach()
        distance = self.distance(logprobs.clamp(max=0.0), (logprobs - log_r).clamp(max=0.0))
        above = (advantages > 0) & (log_r > 0) & (distance > config.eps_high)
        below = (advantages < 0) & (log_r < 0) & (distance > config.eps_low)
        return above, below

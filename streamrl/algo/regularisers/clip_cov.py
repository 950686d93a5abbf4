"""Some tokens of large covariance lose their gradient (arXiv:2505.22617)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.regularisers.base import Measured, Regulariser, first

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.config.algo import AlgoConfig


class ClipCov(Regulariser):
    """Tokens drawn by lot from those between the edges of the covariance lose their gradient.

    Source: Clip-Cov (arXiv:2505.22617).
    """

    label = "clip_cov"
    uses = frozenset({"covariance_share", "covariance_low", "covariance_high"})

    def pick(self, measured: Measured, config: AlgoConfig) -> Tensor:
        covariance, lots = measured.covariance, measured.lots
        inside = (covariance > config.covariance_low) & (covariance < config.covariance_high) & ~measured.stopped
        eligible = inside.nonzero().squeeze(-1)
        return first(eligible[lots[eligible].argsort()], measured, config)

    def mask(self, picked: Tensor) -> Tensor:
        return picked

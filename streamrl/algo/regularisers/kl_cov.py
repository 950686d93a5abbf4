"""The tokens of the largest covariance get a penalty (arXiv:2505.22617)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.regularisers.base import Measured, Regulariser, first

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.config.algo import AlgoConfig


class KlCov(Regulariser):
    """The share of the tokens with the largest covariance gets a KL penalty; lots decide between equal ones.

    Source: KL-Cov (arXiv:2505.22617).
    """

    of_ratio = True
    label = "kl_cov"
    uses = frozenset({"covariance_share", "covariance_kl"})

    def pick(self, measured: Measured, config: AlgoConfig) -> Tensor:
        by_lot = measured.lots.argsort()
        order = by_lot[measured.covariance[by_lot].argsort(descending=True, stable=True)]
        return first(order, measured, config)

    def penalty(self, picked: Tensor, log_r: Tensor, config: AlgoConfig) -> Tensor:
        """The KL estimate of the paper, |log r|."""
        from streamrl.algo.ratios import bounded

        # A number times a bool tensor would be float32.
        return config.covariance_kl * (picked * bounded(log_r).abs())

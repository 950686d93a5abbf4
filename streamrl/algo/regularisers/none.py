"""Nothing is done to any token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.regularisers.base import Measured, Regulariser

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.config.algo import AlgoConfig


class Nothing(Regulariser):
    """Nothing."""

    acts = False

    def pick(self, measured: Measured, config: AlgoConfig) -> Tensor:
        from streamrl.algo.clipping import nowhere

        return nowhere(measured.covariance)

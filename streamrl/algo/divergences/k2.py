"""Half the square of the log-ratio (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.divergences.base import Divergence

if TYPE_CHECKING:
    from torch import Tensor


class K2(Divergence):
    """Half the square of the log-ratio, `d^2 / 2`: its gradient is in the mean that of the divergence."""

    follows_k2 = True

    def estimate(self, difference: Tensor) -> Tensor:
        return difference.square() / 2

"""The log-ratio (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.divergences.base import Divergence

if TYPE_CHECKING:
    from torch import Tensor


class K1(Divergence):
    """The log-ratio itself, `-d`: unbiased, of either sign; its own gradient is 0 in the mean."""

    def estimate(self, difference: Tensor) -> Tensor:
        return -difference

"""The estimate of small variance (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.divergences.base import Divergence

if TYPE_CHECKING:
    from torch import Tensor


class K3(Divergence):
    """`exp(d) - 1 - d`: unbiased, never below 0, of small variance. In float64: near 0 its terms cancel."""

    def estimate(self, difference: Tensor) -> Tensor:
        import torch

        wide = difference.double()
        return (torch.expm1(wide) - wide).to(difference.dtype)

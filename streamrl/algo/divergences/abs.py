"""The size of the log-ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.divergences.base import Divergence

if TYPE_CHECKING:
    from torch import Tensor


class Absolute(Divergence):
    """The size of the log-ratio, `|d|`."""

    def estimate(self, difference: Tensor) -> Tensor:
        return difference.abs()

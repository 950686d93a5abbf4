"""The divergence itself, over the whole vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.divergences.base import Divergence

if TYPE_CHECKING:
    from torch import Tensor


class Full(Divergence):
    """The divergence itself at every position, over the whole vocabulary: no estimate, and its own gradient."""

    of_vocabulary = True
    follows_k2 = True

    def estimate(self, difference: Tensor) -> Tensor:
        raise NotImplementedError("a token's log-ratio does not say what the whole vocabulary does")

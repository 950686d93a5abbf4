"""The mean of the group (GRPO, arXiv:2402.03300)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.baselines.base import Baseline

if TYPE_CHECKING:
    from torch import Tensor


class Mean(Baseline):
    """The mean reward of the group. Source: GRPO (arXiv:2402.03300)."""

    def left(self, centred: Tensor, lengths: Tensor | None) -> Tensor:
        return centred

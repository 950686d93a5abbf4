"""The mean of the other answers (RLOO, arXiv:2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.baselines.base import Baseline

if TYPE_CHECKING:
    from torch import Tensor


class LeaveOneOut(Baseline):
    """The mean reward of the other answers; with std=none, RLOO (arXiv:2402.14740)."""

    def left(self, centred: Tensor, lengths: Tensor | None) -> Tensor:
        return centred * (len(centred) / (len(centred) - 1))

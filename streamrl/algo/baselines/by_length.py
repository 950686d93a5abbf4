"""The mean weighted by length (OPO, arXiv:2505.23585)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.baselines.base import Baseline

if TYPE_CHECKING:
    from torch import Tensor


class ByLength(Baseline):
    """The mean reward of the group, an answer counting as often as it has trained tokens; with std=none, OPO.

    It is of the least variance where the squared gradient of an answer grows with its length. Source: arXiv:2505.23585.
    """

    needs_lengths = True

    def left(self, centred: Tensor, lengths: Tensor | None) -> Tensor:
        assert lengths is not None
        total = int(lengths.sum())
        return centred - (centred * lengths).sum() / total if total else centred

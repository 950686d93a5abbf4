"""The lead of the best answer (pass@k training, arXiv:2503.19595)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.baselines.base import Baseline

if TYPE_CHECKING:
    from torch import Tensor


class BestAlone(Baseline):
    """The best answer by its lead over the second best, the others 0; of two equal ones, all 0.

    The gradient of the largest reward of a group: what pass@k measures. Source: arXiv:2503.19595.
    """

    def left(self, centred: Tensor, lengths: Tensor | None) -> Tensor:
        import torch

        first, second = centred.topk(2).values
        return torch.where(centred == first, first - second, 0.0)

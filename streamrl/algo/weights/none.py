"""No importance weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.weights.base import ImportanceWeight

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Unweighted(ImportanceWeight):
    """1 for every token; where the surrogate has no ratio, the ratio itself."""

    corrects = False

    def factors(
        self, tokens: TokenBatch, log_correction: Tensor, config: AlgoConfig, *, of_policy: bool
    ) -> tuple[Tensor, Tensor]:
        import torch

        from streamrl.algo.ratios import bounded_exp

        ratio = bounded_exp(log_correction)
        return ratio, ratio if of_policy else torch.ones_like(ratio)

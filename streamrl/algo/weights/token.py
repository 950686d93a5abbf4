"""The truncated ratio of every token by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.weights.base import ImportanceWeight

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class TokenWeight(ImportanceWeight):
    """The token's own ratio, at most `C(s)`. Source: IMPALA (arXiv:1802.01561)."""

    uses = frozenset({"weight_cap", "weight_gamma"})

    def factors(
        self, tokens: TokenBatch, log_correction: Tensor, config: AlgoConfig, *, of_policy: bool
    ) -> tuple[Tensor, Tensor]:
        from streamrl.algo.importance import truncated
        from streamrl.algo.ratios import bounded_exp

        ratio = bounded_exp(log_correction)
        return ratio, truncated(ratio, tokens.staleness, config)

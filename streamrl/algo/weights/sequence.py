"""The truncated ratio of whole samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.weights.base import ImportanceWeight

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class SequenceWeight(ImportanceWeight):
    """The product of the ratios of the token's sample, at most `C(s)` of its oldest token."""

    of_sample = True
    uses = frozenset({"weight_cap", "weight_gamma"})

    def factors(
        self, tokens: TokenBatch, log_correction: Tensor, config: AlgoConfig, *, of_policy: bool
    ) -> tuple[Tensor, Tensor]:
        from streamrl.algo.importance import truncated
        from streamrl.algo.ratios import bounded_exp, product, sample_staleness

        ratio = bounded_exp(product(log_correction, tokens.sample, tokens.samples))
        return ratio, truncated(ratio, sample_staleness(tokens.staleness, tokens.sample, tokens.samples), config)

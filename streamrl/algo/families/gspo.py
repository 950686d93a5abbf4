"""The clip of a sample's ratio (GSPO, arXiv:2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families.base import Family

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Gspo(Family):
    """The clip on the sample's ratio, the geometric mean of its tokens' r. Source: GSPO (arXiv:2507.18071).

    It moves far less than a token's ratio: the paper's clip range is 3e-4 and 4e-4.
    """

    needs_cap = False
    uses = frozenset({"eps_low", "eps_high", "dual_clip"})

    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        from streamrl.algo.clipping import clipped_surrogate
        from streamrl.algo.ratios import bounded_exp, geometric_mean

        ratio = bounded_exp(geometric_mean(log_r, tokens.sample, tokens.samples))
        return clipped_surrogate(ratio, tokens.advantages, config)

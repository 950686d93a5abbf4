"""The policy gradient without a correction (GPG, arXiv:2504.02546)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families.base import Family

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Gpg(Family):
    """`A log pi`. With `proximal: behaviour` nothing corrects for stale data. Source: GPG (arXiv:2504.02546)."""

    needs_cap = False

    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        from streamrl.algo.clipping import as_factor, not_clipped

        return tokens.advantages * as_factor(tokens.logprobs), not_clipped(log_r)

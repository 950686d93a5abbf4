"""A gate instead of a clip (SAPO, arXiv:2511.20347)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families.base import Family

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Sapo(Family):
    """`(4 / tau) sigmoid(tau (r - 1)) A`, tau by the advantage's sign: a gate instead of a clip, of slope 1 at r = 1.

    Source: SAPO (arXiv:2511.20347).
    """

    needs_cap = False
    uses = frozenset({"sapo_positive", "sapo_negative"})

    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        from streamrl.algo.clipping import not_clipped
        from streamrl.algo.ratios import bounded_exp

        ratio = bounded_exp(log_r)
        gains = tokens.advantages > 0
        temperature = torch.full_like(ratio, config.sapo_negative).masked_fill(gains, config.sapo_positive)
        gate = torch.sigmoid(temperature * (ratio - 1)) * (4 / temperature)
        return gate * tokens.advantages, not_clipped(ratio)

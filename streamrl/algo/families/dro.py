"""A regression of the log-ratio on the advantage (DRO, arXiv:2405.19107)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families.base import Family

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Dro(Family):
    """`-(A - tau log r)^2 / (2 tau)`, tau = algo.dro_temperature: log r is drawn to A / tau, from either side.

    Its gradient is that of `A log pi - tau (log r)^2 / 2`. Source: DRO (arXiv:2405.19107), there of a whole answer.
    """

    needs_cap = False
    uses = frozenset({"dro_temperature"})

    def surrogate(self, tokens: TokenBatch, log_r: Tensor, config: AlgoConfig) -> tuple[Tensor, dict[str, Tensor]]:
        from streamrl.algo.clipping import not_clipped
        from streamrl.algo.ratios import bounded

        tau = config.dro_temperature
        return -((tokens.advantages - tau * bounded(log_r)).square()) / (2 * tau), not_clipped(log_r)

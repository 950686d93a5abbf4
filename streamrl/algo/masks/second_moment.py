"""Tokens of a whole step (M2PO, arXiv:2510.01161)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.masks.base import Mask

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.config.algo import AlgoConfig


class SecondMoment(Mask):
    """The tokens of the largest (log rho)^2 of a step, until the mean of the others is small enough.

    Source: M2PO (arXiv:2510.01161).
    """

    uses = frozenset({"second_moment"})
    whole_step = True
    label = "second_moment"

    @classmethod
    def check(cls, section: AlgoConfig) -> None:
        if not section.chosen("proximal").scored:
            raise ValueError(f"mask: {section.mask} needs proximal=recompute, not {section.proximal}")

    def outliers(self, log_rho: Tensor, config: AlgoConfig) -> Tensor:
        from streamrl.algo.whole_step import second_moment_outliers

        return second_moment_outliers(log_rho, config.second_moment)

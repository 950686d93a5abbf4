"""DPPO by the total variation of one token (arXiv:2602.04879)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families._dppo import Dppo

if TYPE_CHECKING:
    from torch import Tensor


class DppoTv(Dppo):
    """`sg(min(r, c)) A log pi`, 0 where `|pi - pi_old|` of the token is beyond eps_low, eps_high the way of A.

    Source: DPPO-Binary-TV (arXiv:2602.04879).
    """

    def distance(self, logprobs: Tensor, old: Tensor) -> Tensor:
        return (logprobs.exp() - old.exp()).abs()

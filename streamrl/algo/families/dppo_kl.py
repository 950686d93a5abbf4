"""DPPO by the divergence KL(pi_old || pi) of one token (arXiv:2602.04879)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.families._dppo import Dppo

if TYPE_CHECKING:
    from torch import Tensor


SMALLEST = 1e-8  # of a probability of all other tokens, as verl has it


class DppoKl(Dppo):
    """As `dppo_tv`, by the KL divergence between pi_old and pi over "this token" and "another one", nats.

    Source: DPPO-Binary-KL (arXiv:2602.04879).
    """

    def distance(self, logprobs: Tensor, old: Tensor) -> Tensor:
        p, q = old.exp(), logprobs.exp()
        return p * (old - logprobs) + (1 - p) * ((1 - p + SMALLEST) / (1 - q + SMALLEST)).log()

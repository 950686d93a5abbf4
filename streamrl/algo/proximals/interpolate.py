"""A policy between the one that generated the token and the learner's: the weights that the step starts from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.proximals.base import Proximal

if TYPE_CHECKING:
    from torch import Tensor


class Interpolate(Proximal):
    """`log mu + alpha log rho`, `alpha = s / (s + 1)`: pi_old where pi is one step past it, by the versions.

    A fresh token stays near the policy that generated it, an old one near the learner, without the second forward pass.
    """

    def logprobs(self, behaviour: Tensor, log_rho: Tensor, staleness: Tensor, scores: Tensor | None) -> Tensor:
        age = staleness.to(log_rho.dtype)
        return behaviour + age / (age + 1) * log_rho

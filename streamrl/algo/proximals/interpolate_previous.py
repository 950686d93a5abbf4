"""A policy between the one that generated the token and the learner's: the version before the step's first weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.proximals.base import Proximal

if TYPE_CHECKING:
    from torch import Tensor


class InterpolatePrevious(Proximal):
    """`log mu + alpha log rho`, `alpha = (s - 1) / s`, 0 where s = 0: mu itself up to a staleness of one step.

    As `interpolate`, with pi taken for the weights that the step starts from. Source: `loglinear` of AReaL
    (arXiv:2512.06547), with the version that its trainer has during an update.
    """

    def logprobs(self, behaviour: Tensor, log_rho: Tensor, staleness: Tensor, scores: Tensor | None) -> Tensor:
        age = staleness.to(log_rho.dtype).clamp(min=1)
        return behaviour + (age - 1) / age * log_rho

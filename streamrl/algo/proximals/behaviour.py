"""The policy that generated the token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.proximals.base import Proximal

if TYPE_CHECKING:
    from torch import Tensor


class Behaviour(Proximal):
    """The behaviour policy mu itself."""

    of_policy = True

    def logprobs(self, behaviour: Tensor, log_rho: Tensor, staleness: Tensor, scores: Tensor | None) -> Tensor:
        return behaviour

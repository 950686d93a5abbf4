"""The policy at the beginning of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.algo.proximals.base import Proximal

if TYPE_CHECKING:
    from torch import Tensor


class Recompute(Proximal):
    """The weights that the step starts from, by one more forward pass. Source: decoupled PPO (arXiv:2110.00641)."""

    scored = True

    def logprobs(self, behaviour: Tensor, log_rho: Tensor, staleness: Tensor, scores: Tensor | None) -> Tensor:
        from streamrl.algo.tokens import needed

        return needed(scores, "proximal", "algo.proximal=recompute").detach()

"""The effective sample size of each group of a step, by which the replay service chooses what is trained again.

Of a group's n trained tokens with ratios rho = pi / mu under the weights that train it: (sum rho)^2 / (n sum rho^2), as
`offpolicy/ess` is of a whole step. A mean that is weighted by rho has the variance of one over that share of its
tokens. Source: Kong, A note on importance sampling using standardized weights (1992).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from streamrl.algo.ratios import bounded, log_ratio
from streamrl.algo.tokens import TokenBatch
from streamrl.learner.parallel import fill_from_last_stage
from streamrl.types import Group


def ends_of(groups: Sequence[Group]) -> np.ndarray:
    """Number of trained tokens of the step up to the end of each group, in the batch's order: int64 [G]."""
    return np.cumsum([group.trained_tokens for group in groups], dtype=np.int64)


class GroupEss:
    """Sums over the micro batches and ranks of one step after another."""

    def __init__(self, *, taught: bool) -> None:
        """`taught`: a teacher has a part in each advantage, so that groups without one of their own teach as well."""
        self._taught = taught
        self._ends = torch.zeros(0, dtype=torch.int64)
        self._sums = torch.zeros(4, 0, dtype=torch.float64)  # tokens, rho, rho^2, tokens with an advantage

    def begin(self, ends: np.ndarray, device: torch.device) -> None:
        """A step whose groups end so (`ends_of`)."""
        self._ends = torch.from_numpy(ends).to(device)
        self._sums = torch.zeros(4, len(ends), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, place: np.ndarray, tokens: TokenBatch) -> None:
        """A micro batch; `place`: of its tokens among all trained ones of the step."""
        group = torch.bucketize(torch.from_numpy(place).to(self._ends.device), self._ends, right=True)
        usable = tokens.behaviour.isfinite()
        rho = bounded(log_ratio(tokens.logprobs.detach(), tokens.behaviour).double()).exp()
        learned = torch.ones_like(usable) if self._taught else tokens.advantages != 0
        values = torch.stack([torch.ones_like(rho), rho, rho.square(), learned.double()])
        self._sums.index_add_(1, group[usable], values[:, usable])

    def finish(self) -> list[float | None]:
        """The effective sample size of each group, 0..1; None where it taught nothing, or a log-prob is not finite.

        Collective; the same on every rank.
        """
        if parallel_state.is_pipeline_last_stage():
            dist.all_reduce(self._sums, group=parallel_state.get_data_parallel_group())
        fill_from_last_stage(self._sums)
        return of_sums(self._sums)


def of_sums(sums: Tensor) -> list[float | None]:
    """From float64 [4, G]: tokens, rho, rho^2, tokens with an advantage.

    >>> of_sums(torch.tensor([[4.0, 4.0, 0.0], [4.0, 4.0, 0.0], [4.0, 8.0, 0.0], [4.0, 4.0, 0.0]]))
    [1.0, 0.5, None]
    """
    return [
        _ratio(count, total, squares) if count and learned else None
        for count, total, squares, learned in sums.T.tolist()
    ]


def _ratio(count: float, total: float, squares: float) -> float | None:
    """None where a log-prob of the group is not finite: nothing says how far it is from the policy."""
    ratio = total * total / (count * squares)
    return min(1.0, ratio) if math.isfinite(ratio) else None

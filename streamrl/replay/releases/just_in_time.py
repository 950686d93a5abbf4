"""As late as still keeps the learner fed, by how long groups take."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from itertools import takewhile

from pydantic import Field

from streamrl.choices import Options
from streamrl.replay.releases.base import Release

LEAST = 4  # learner steps whose groups must be complete first, and ...
LEAST_GROUPS = 32  # ... groups, where steps are small
KEPT = 64  # learner steps whose groups are remembered: lengths change as the policy learns ...
KEPT_GROUPS = (256, 4096)  # ... and groups, at least and at most


class Timing(Options):
    """How early is early enough."""

    quantile: float = Field(
        0.9, gt=0, lt=1, description="share of learner steps whose groups are all to be complete in time"
    )
    margin: float = Field(0.25, ge=0, description="share of the lead time that is added to it for safety")


class JustInTime(Release):
    """As late as still keeps the learner fed: data is as young as generation and training allow at the same speed.

    Lead time = (Q + (rounds - 1) x mean) x (1 + margin); Q = the quantile^(1/P) quantile of the seconds from a group's
    first ticket to its completion, so that all P groups of a step are complete in that share of the steps, if they are
    independent. A group that is out longer than Q counts as one that takes at least that long, so that a straggler
    raises Q before it is back. Not known until LEAST steps' groups are complete.

    >>> release = JustInTime(groups_per_step=1, options=Timing(quantile=0.5, margin=0.0))
    >>> for seconds in range(1, 41):
    ...     release.completed(seconds)
    >>> release.lead(open_for=(), rounds=1.0), release.lead(open_for=(99.0,) * 4, rounds=1.0)
    (20.0, 22.0)
    """

    Options = Timing
    options: Timing

    def __init__(self, groups_per_step: int, options: Timing) -> None:
        super().__init__(groups_per_step, options)
        self._share = options.quantile ** (1 / groups_per_step)
        self._least = max(LEAST_GROUPS, LEAST * groups_per_step)
        self._kept = max(KEPT_GROUPS[0], min(KEPT_GROUPS[1], KEPT * groups_per_step))
        self._recent: deque[float] = deque()  # seconds, in the order of completion
        self._sorted: list[float] = []
        self._quantile: float | None = None

    def completed(self, seconds: float) -> None:
        if len(self._recent) == self._kept:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(seconds)
        insort(self._sorted, seconds)

    def lead(self, open_for: Iterable[float], rounds: float) -> float | None:
        if len(self._sorted) < self._least:
            return None
        self._quantile = self._measured(open_for)
        waits = (rounds - 1) * sum(self._sorted) / len(self._sorted) if rounds > 1 else 0.0
        return (self._quantile + waits) * (1 + self.options.margin)

    def metrics(self) -> dict[str, float]:
        return {} if self._quantile is None else {"release/quantile": self._quantile}

    def _measured(self, open_for: Iterable[float]) -> float:
        """Of complete groups, and of those that are out for longer than the quantile of the complete ones."""
        place = self._place(len(self._sorted))
        complete = self._sorted[place]
        late = sorted(takewhile(lambda seconds: seconds > complete, open_for))
        if not late:
            return complete
        beyond = sorted((*self._sorted[place:], *late))
        return beyond[self._place(len(self._sorted) + len(late)) - place]

    def _place(self, count: int) -> int:
        """Of the quantile among so many."""
        return max(0, math.ceil(self._share * count) - 1)

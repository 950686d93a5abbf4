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
KEPT = 12  # learner steps whose groups are remembered: the start, when much is under way, is soon forgotten ...
KEPT_GROUPS = 64  # ... and groups, at least


class Timing(Options):
    """How early is early enough."""

    quantile: float = Field(
        0.9, gt=0, lt=1, description="share of learner steps whose groups are all to be complete in time"
    )
    margin: float = Field(0.5, ge=0, description="share of the lead time that is added to it for safety")


class JustInTime(Release):
    """As late as still keeps the learner fed: data is as young as generation and training allow at the same speed.

    Lead time = (Q + (rounds - 1) x mean) x (1 + margin). Each P groups that come one after another are taken for those
    of a step, which has to wait for the slowest; Q = the quantile of these slowest, in seconds from a group's first
    ticket on. What makes all groups slow for a while counts as the few steps that it is, not as many groups. Groups
    that are out longer than Q count as steps that take at least that long, so that a straggler raises Q before it is
    back. Not known until LEAST steps' groups are complete.

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
        self.slow_start = max(LEAST, -(-LEAST_GROUPS // groups_per_step))
        self._kept = max(KEPT, -(-KEPT_GROUPS // groups_per_step))
        self._step: list[float] = []  # seconds of the groups of the step that is not full yet
        self._recent: deque[tuple[float, float]] = deque()  # of each step its slowest group and its mean
        self._slowest: list[float] = []  # sorted
        self._quantile: float | None = None

    def completed(self, seconds: float) -> None:
        self._step.append(seconds)
        if len(self._step) < self.groups_per_step:
            return
        if len(self._recent) == self._kept:
            slowest, _ = self._recent.popleft()
            del self._slowest[bisect_left(self._slowest, slowest)]
        slowest = max(self._step)
        self._recent.append((slowest, math.fsum(self._step) / len(self._step)))
        insort(self._slowest, slowest)
        self._step.clear()

    def lead(self, open_for: Iterable[float], rounds: float) -> float | None:
        if len(self._slowest) < self.slow_start:
            return None
        self._quantile = self._measured(open_for)
        waits = (rounds - 1) * sum(mean for _, mean in self._recent) / len(self._recent) if rounds > 1 else 0.0
        return (self._quantile + waits) * (1 + self.options.margin)

    def metrics(self) -> dict[str, float]:
        return {} if self._quantile is None else {"release/quantile": self._quantile}

    def _measured(self, open_for: Iterable[float]) -> float:
        """Of complete steps, and of the fewest that have the groups that are out for longer than their quantile."""
        place = self._place(len(self._slowest))
        complete = self._slowest[place]
        late = sorted(takewhile(lambda seconds: seconds > complete, open_for), reverse=True)[:: self.groups_per_step]
        if not late:
            return complete
        beyond = sorted((*self._slowest[place:], *late))
        return beyond[self._place(len(self._slowest) + len(late)) - place]

    def _place(self, count: int) -> int:
        """Of the quantile among so many."""
        return max(0, math.ceil(self.options.quantile * count) - 1)

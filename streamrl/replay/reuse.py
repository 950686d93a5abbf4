"""Which groups may be trained again: `replay.reuse`. Pure.

    CONSUMED ──the learner tells the effective sample size──▶ reusable ──a later step has places for it──▶ CONSUMED

At most R places of a step go to groups that an earlier step had: those with the largest effective sample size at their
last use, among equals the youngest. The others, F at least, are filled as the order says. A group is trained again
while it had fewer than k uses, its effective sample size is known and large enough, and no token of it is too old. An
adaptive bound that is lowered takes the oldest of them from the next steps: they may have them once it is raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from streamrl.config import reuse
from streamrl.config.replay import ReplayConfig
from streamrl.replay.lives import Life


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """What is configured.

    Example: `Reuse(times=2, most=4, groups=8, least_ess=0.5, max_age=2, horizon=3)`.
    """

    times: int = 1  # k, uses of a group
    most: int = 0  # R, groups of a step that an earlier one had
    groups: int = 1  # P
    least_ess: float = 0.0
    max_age: int = 0  # A, learner steps
    bound: int = 0  # S, rounded up: of what is trained for the first time
    horizon: int = 0  # steps before the oldest that can be asked for whose weights a ticket may require

    @property
    def active(self) -> bool:
        """May any group be trained again?"""
        return self.times > 1

    def possible(self, life: Life, step: int) -> bool:
        """May the group be trained again by `step`, as far as uses, age and content go?"""
        record = life.completed
        if not self.active or record is None or record.oldest is None or life.quarantined:
            return False
        is_there = life.place is not None or life.frames is not None
        return is_there and 0 < len(life.uses) < self.times and step - record.oldest <= self.max_age

    def admitted(self, lowered: int) -> int:
        """The largest age, where the admitted staleness is so many steps below the configured one.

        >>> [Reuse(max_age=age, bound=16).admitted(12) for age in (2, 16, 20)]
        [2, 4, 8]
        """
        return min(self.max_age, max(self.max_age, self.bound) - lowered)

    def select(self, step: int, lives: Iterable[Life], lowered: int = 0) -> tuple[int, ...]:
        """The ids of the groups that `step` trains again, R at most, the best first."""
        ranked, oldest = [], step - self.admitted(lowered)
        for life in lives:
            if life.ess is not None and life.ess >= self.least_ess and self.possible(life, step):
                assert life.completed is not None
                assert life.completed.oldest is not None
                if life.completed.oldest >= oldest:
                    ranked.append((-life.ess, -life.completed.oldest, life.group_id))
        return tuple(group_id for *_, group_id in sorted(ranked)[: self.most])

    def metrics(self, reused: int) -> dict[str, float]:
        """Of a batch with so many groups that were trained before; nothing where none may be."""
        return {"replay/reused": float(reused), "replay/reused_share": reused / self.groups} if self.active else {}


ONCE = Reuse()  # no group is trained again


def make_reuse(replay: ReplayConfig) -> Reuse:
    """The reuse of a run."""
    return Reuse(
        times=replay.reuse,
        most=reuse.most(replay),
        groups=replay.groups_per_step,
        least_ess=replay.reuse_min_ess,
        max_age=replay.reuse_bound,
        bound=math.ceil(replay.bound),
        horizon=math.ceil(replay.bound) + 1,
    )

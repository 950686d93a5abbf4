"""In which order groups are consumed, and what bounds their age: admit, select, evict and capacity in one object.

They stand together because the staleness bound follows from all four; apart, they would drift.

Symbols: P groups make a step; N slots; W the window; v the step of the newest acknowledged weights; group ids
count 0, 1, 2, ... in the order of issue.

**Rule.** A slot is taken when a group's first ticket is issued and freed when a server has acknowledged weights
that contain the group's step. Weights of step v contain vP groups, whichever these are. So ticket i may be
issued if and only if

    i < vP + N                                                                        (admit)

The smallest v that satisfies it, r(i) = floor((i - N) / P) + 1, is the oldest version that may generate
group i: the ticket says so, and it goes only to a worker with a server at r(i) or newer.

**Bound.** If group i is the j-th that is consumed (from 0), step floor(j / P) trains it, and its staleness is at
most floor(j / P) - r(i). Strict order has j = i; the window has j <= i + W - 1; both give

    floor((i + W - 1) / P) - floor((i - N) / P) - 1  <=  floor((N + W - 2) / P)

and N = floor((S + 1) P) - (W - 1) makes that at most ceil(S). Completion order has no limit on j: there the age
is looked at when a group is selected.

**No deadlock.** With k steps between two published versions, those after v need the groups below (v + k)P at
most. All of these are admitted at v if and only if N >= kP.

docs/bound.md has the proofs in full and works examples through.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from itertools import count, islice

from streamrl.config.replay import ReplayConfig


class Order(ABC):
    """Which tickets may be issued, which groups make a step, whose slots are free again. No state."""

    window = 1  # W

    def __init__(self, groups_per_step: int, slots: int) -> None:
        """Raises ValueError where the slots do not even hold one step."""
        if not 1 <= groups_per_step <= slots:
            raise ValueError(f"{slots} slots for steps of {groups_per_step} groups: at least one step must fit")
        self.groups_per_step = groups_per_step
        self._slots = slots

    @property
    def capacity(self) -> int:
        """N, the slots: groups that are issued and not yet part of acknowledged weights."""
        return self._slots

    @property
    @abstractmethod
    def worst_staleness(self) -> int | None:
        """The bound in learner steps: no trained token is older. None where nothing bounds it."""

    @abstractmethod
    def select(
        self, step: int, completed: Mapping[int, int | None], below: int, above: Container[int]
    ) -> tuple[int, ...] | None:
        """The ids of the step's P groups, in order; None while there are not enough.

        `completed` maps a group that waits to the step of its oldest token, in the order of completion. Every
        group below `below` is consumed, and those in `above`; `below` itself is not.
        """

    def first(self, step: int) -> int:
        """The first group id of a run that starts at learner step `step`, and the slots that its weights free."""
        return step * self.groups_per_step

    def slots_at(self, staleness: float) -> int:
        """N = floor((S + 1) P) - (W - 1), at most the capacity."""
        return min(self._slots, math.floor((staleness + 1) * self.groups_per_step) - (self.window - 1))

    def required_step(self, group_id: int, step: int = 0, slots: int | None = None) -> int:
        """r(i): the oldest step whose weights may generate the group, while `step` is the next to be consumed.

        `slots` stands for fewer than `capacity` (`replay/adaptive.py`).
        """
        return max(0, (group_id - (slots or self._slots)) // self.groups_per_step + 1)

    def admit(self, group_id: int, acknowledged: int, step: int = 0, slots: int | None = None) -> bool:
        """May this ticket be issued, with weights of step `acknowledged` on a server?"""
        return self.required_step(group_id, step, slots) <= acknowledged

    def over_age(self, step: int, oldest: int | None) -> bool:
        """Must a group with tokens of step `oldest` be generated again instead of being trained by `step`?"""
        return False


class StrictOrder(Order):
    """`fifo`, and `synchronous` with as many slots as a step has groups: groups are consumed in the order of ids.

    >>> order = StrictOrder(groups_per_step=8, slots=24)  # S = 2
    >>> order.worst_staleness, order.admit(23, acknowledged=0), order.admit(24, acknowledged=0)
    (2, True, False)
    >>> order.required_step(24), order.select(1, dict.fromkeys(range(16)), below=8, above=())
    (1, (8, 9, 10, 11, 12, 13, 14, 15))
    """

    @property
    def worst_staleness(self) -> int:
        return (self._slots - 1) // self.groups_per_step

    def select(
        self, step: int, completed: Mapping[int, int | None], below: int, above: Container[int]
    ) -> tuple[int, ...] | None:
        ids = tuple(islice((i for i in count(below) if i not in above), self.groups_per_step))
        return ids if all(i in completed for i in ids) else None


class WindowedOrder(Order):
    """`windowed`: each pick is the lowest completed id of the W that begin with the oldest unconsumed one.

    So at most W - 1 groups pass a straggler, which is then waited for.

    >>> order = WindowedOrder(groups_per_step=2, slots=4, window=3)  # S = 2
    >>> order.worst_staleness, order.select(0, {1: 0, 2: 0, 3: 0}, below=0, above=())
    (2, (1, 2))
    """

    def __init__(self, groups_per_step: int, slots: int, window: int) -> None:
        """Raises ValueError where the slots do not even hold one step, or the window no group."""
        super().__init__(groups_per_step, slots)
        if window < 1:
            raise ValueError(f"a window of {window} ids: at least 1 is needed")
        self.window = window

    @property
    def worst_staleness(self) -> int:
        return (self._slots + self.window - 2) // self.groups_per_step

    def select(
        self, step: int, completed: Mapping[int, int | None], below: int, above: Container[int]
    ) -> tuple[int, ...] | None:
        if len(completed) < self.groups_per_step:
            return None
        picked: dict[int, None] = {}
        oldest = below
        while len(picked) < self.groups_per_step:
            while oldest in above or oldest in picked:
                oldest += 1
            window = range(oldest, oldest + self.window)
            pick = next((i for i in window if i in completed and i not in picked), None)
            if pick is None:
                return None
            picked[pick] = None
        return tuple(picked)


class ReadyOrder(Order):
    """`ready`: groups are consumed as they complete, which favours short answers; for experiments.

    A group older than `bound` steps at its selection is generated again (`drop`), or trained as it is.

    >>> order = ReadyOrder(groups_per_step=2, slots=6, bound=2, drop=True)
    >>> order.select(3, {7: 2, 5: 1, 6: 3}, below=5, above=()), order.over_age(4, oldest=1)
    ((7, 5), True)
    """

    def __init__(self, groups_per_step: int, slots: int, bound: int, drop: bool) -> None:
        """Raises ValueError where the slots do not even hold one step, or reach beyond the bound."""
        super().__init__(groups_per_step, slots)
        if bound * groups_per_step < slots - groups_per_step:
            raise ValueError(f"{slots} slots of steps of {groups_per_step} groups can be older than {bound} steps")
        self._bound = bound
        self._drop = drop

    @property
    def worst_staleness(self) -> int | None:
        return self._bound if self._drop else None

    def required_step(self, group_id: int, step: int = 0, slots: int | None = None) -> int:
        """Where over-age groups are dropped, a ticket also has to meet the bound when it is taken next."""
        required = super().required_step(group_id, step, slots)
        return max(required, step - self._bound) if self._drop else required

    def select(
        self, step: int, completed: Mapping[int, int | None], below: int, above: Container[int]
    ) -> tuple[int, ...] | None:
        ids = tuple(islice(completed, self.groups_per_step))
        return ids if len(ids) == self.groups_per_step else None

    def over_age(self, step: int, oldest: int | None) -> bool:
        return self._drop and oldest is not None and step - oldest > self._bound


def make_order(config: ReplayConfig, publish_every: int = 1) -> Order:
    """The order that `replay.order` names. Raises ValueError where a publish every k steps would deadlock."""
    groups, slots = config.groups_per_step, config.slots
    if slots < publish_every * groups:
        raise ValueError(
            f"{slots} slots would deadlock: {publish_every * groups} groups train before a publish; "
            "raise replay.max_staleness, or lower publish.every or replay.window"
        )
    match config.order:
        case "fifo" | "synchronous":
            return StrictOrder(groups, slots)
        case "windowed":
            return WindowedOrder(groups, slots, config.window)
        case "ready":
            return ReadyOrder(groups, slots, math.ceil(config.bound), config.over_age == "drop")

"""In which order groups are consumed, and what bounds their age: admit, select, evict and capacity in one object.

They stand together because the staleness bound follows from all four; apart, they would drift.

Symbols: P groups make a step; N slots; v the step of the newest acknowledged weights; group ids count
0, 1, 2, ... in the order of issue. Strict order: step s consumes the groups sP .. sP + P - 1.

**Rule.** A slot is taken when a ticket is issued and freed when a server has acknowledged weights that
contain the group's step. So at v the slots of all groups below vP are free, and ticket i may be issued
if and only if

    i < vP + N                                                                        (admit)

The smallest v that satisfies it, r(i) = floor((i - N) / P) + 1, is the oldest version that may generate
group i: the ticket says so, and it goes only to a worker with a server at r(i) or newer.

**Proof of the bound.** Group i is trained by step floor(i / P), on weights of that version, and none of
its tokens is older than r(i). Its staleness is at most

    floor(i / P) - floor((i - N) / P) - 1  <=  floor((N - 1) / P)  =  ceil(N / P) - 1

since floor(a) - floor(b) <= ceil(a - b) and a - b = N / P. With N = floor((S + 1) P) this is at most
ceil(S), for any publish interval k: the argument never uses which versions are published. The mean over
a step of the left side is N / P - 1 <= S, which is what a fractional S means.

**No deadlock.** With k steps between two published versions, the next one after v is at most v + k and
needs the groups below (v + k)P. All of these are admitted at v if and only if N >= kP.

docs/bound.md works an example through.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container

from streamrl.config import ReplayConfig


class Order(ABC):
    """Which tickets may be issued, which groups make a step, whose slots are free again. No state."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """N, the slots: groups that are issued and not yet part of acknowledged weights."""

    @property
    @abstractmethod
    def worst_staleness(self) -> int:
        """The bound in learner steps: no trained token is older."""

    @abstractmethod
    def first(self, step: int) -> int:
        """The first group id of a run that starts at learner step `step`."""

    @abstractmethod
    def admit(self, group_id: int, acknowledged: int) -> bool:
        """May this ticket be issued, with weights of step `acknowledged` on a server?"""

    @abstractmethod
    def required_step(self, group_id: int) -> int:
        """r(i): the oldest step whose weights may generate the group."""

    @abstractmethod
    def select(self, step: int, completed: Container[int]) -> tuple[int, ...] | None:
        """The ids of the step's groups, in order; None while they are not all completed."""

    @abstractmethod
    def evict(self, acknowledged: int) -> int:
        """The groups below this id have their slots freed by weights of step `acknowledged`."""


class StrictOrder(Order):
    """`fifo`: groups are consumed in the order of their ids.

    >>> order = StrictOrder(groups_per_step=8, slots=24)  # S = 2
    >>> order.worst_staleness, order.admit(23, acknowledged=0), order.admit(24, acknowledged=0)
    (2, True, False)
    >>> order.required_step(24), order.select(1, completed=range(16))
    (1, (8, 9, 10, 11, 12, 13, 14, 15))
    """

    def __init__(self, groups_per_step: int, slots: int) -> None:
        """Raises ValueError where the slots do not even hold one step."""
        if not 1 <= groups_per_step <= slots:
            raise ValueError(f"{slots} slots for steps of {groups_per_step} groups: at least one step must fit")
        self._groups_per_step = groups_per_step
        self._slots = slots

    @property
    def capacity(self) -> int:
        return self._slots

    @property
    def worst_staleness(self) -> int:
        return (self._slots - 1) // self._groups_per_step

    def first(self, step: int) -> int:
        return step * self._groups_per_step

    def admit(self, group_id: int, acknowledged: int) -> bool:
        return group_id < self.evict(acknowledged) + self._slots

    def required_step(self, group_id: int) -> int:
        return max(0, (group_id - self._slots) // self._groups_per_step + 1)

    def select(self, step: int, completed: Container[int]) -> tuple[int, ...] | None:
        ids = range(self.first(step), self.first(step + 1))
        return tuple(ids) if all(group_id in completed for group_id in ids) else None

    def evict(self, acknowledged: int) -> int:
        return acknowledged * self._groups_per_step


def make_order(config: ReplayConfig) -> Order:
    """The order that `replay.order` names."""
    match config.order:
        case "fifo":
            return StrictOrder(config.groups_per_step, config.slots)

"""In which order groups are consumed, and what bounds their age: admit, select, evict and capacity in one object.

They are together because the staleness bound follows from all four; apart, they would drift.

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

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, ClassVar, Self

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from streamrl.config.replay import ReplayConfig
    from streamrl.replay.supply import Supply


ROUNDING = 1e-9  # of a group: what a product of a fraction may be off by


def slots_of(staleness: float, fresh: int) -> int:
    """floor((S + 1) F), as of exact numbers.

    >>> slots_of(0.16, 25)
    29
    """
    return math.floor((staleness + 1) * fresh + ROUNDING)


class Order(Choice, ABC):
    """Which tickets may be issued, which groups make a step, whose slots are free again. No state.

    A class of one's own derives from one of those in this folder, or from this one: then it gives `select` and
    `worst_staleness`, and `allows` if it consumes a group before older ones.
    """

    window = 1  # W
    reuses: ClassVar[bool] = False  # its bound counts `fresh`, and its `select` takes `groups`: see `replay.reuse`
    options = Options()  # of `replay.order_options`, an instance of the class's own Options

    # What a configuration chooses by it.

    @classmethod
    def staleness(cls, config: ReplayConfig) -> float:
        """S, learner steps that a trained token may be old at the most; may be a fraction."""
        return config.max_staleness

    @classmethod
    def slots(cls, config: ReplayConfig) -> int:
        """N = floor((S + 1) F) - (W - 1): groups that may be issued and not yet be part of acknowledged weights.

        F = `config.fresh`, which is P unless groups are trained again.
        """
        return slots_of(cls.staleness(config), config.fresh)

    @classmethod
    def of(cls, config: ReplayConfig) -> Self:
        """The order of a run. Raises ValueError as the constructor does."""
        return cls(config.groups_per_step, config.slots)

    @classmethod
    def leaves_places(cls) -> bool:
        """Can groups that were trained before take places of a step? A `select` of one's own needs `groups`, too."""
        return cls.reuses and "groups" in inspect.signature(cls.select).parameters

    # What it does with ids, steps and slots.

    def __init__(self, groups_per_step: int, slots: int) -> None:
        """Raises ValueError where the slots do not even hold one step."""
        if not 1 <= groups_per_step <= slots:
            raise ValueError(f"{slots} slots for steps of {groups_per_step} groups: at least one step must fit")
        self.groups_per_step = groups_per_step
        self.fresh = groups_per_step  # F, groups of every step that no step had before, at least
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
        self,
        step: int,
        completed: Mapping[int, int | None],
        below: int,
        above: Container[int],
        groups: int | None = None,
    ) -> tuple[int, ...] | None:
        """The ids of the step's P groups, in order; None while there are not enough.

        `groups`: so many instead, where groups that were trained before take the other places (`reuses` alone).

        `completed` maps a group that waits to the step of its oldest token, in the order of completion. Every
        group below `below` is consumed, and those in `above`; `below` itself is not.
        """

    def first(self, step: int) -> int:
        """The first group id of a run that starts at learner step `step`, and the slots that its weights free."""
        return step * self.groups_per_step

    def slots_at(self, staleness: float) -> int:
        """N = floor((S + 1) F) - (W - 1), at most the capacity."""
        return min(self._slots, slots_of(staleness, self.fresh) - (self.window - 1))

    def required_step(
        self, group_id: int, step: int = 0, slots: int | None = None, supply: Supply | None = None
    ) -> int:
        """r(i): the oldest step whose weights may generate the group, while `step` is the next to be consumed.

        `slots` are fewer than `capacity` (`replay/adaptive.py`); `supply` has how many groups the weights of a
        step contain, where that is not P each.
        """
        last = group_id - (slots or self._slots)  # this one's slot must be free
        return max(0, last // self.groups_per_step + 1) if supply is None else supply.first_with(last)

    def admit(self, group_id: int, acknowledged: int, step: int = 0, slots: int | None = None) -> bool:
        """May this ticket be issued, with weights of step `acknowledged` on a server?"""
        return self.required_step(group_id, step, slots) <= acknowledged

    def over_age(self, step: int, oldest: int | None) -> bool:
        """Must a group with tokens of step `oldest` be generated again instead of being trained by `step`?"""
        return False

    def allows(self, group_id: int, oldest: int) -> bool:
        """May a group be consumed while `oldest` is the first id that is not? The audit asks it of every group."""
        return group_id - oldest < self.window

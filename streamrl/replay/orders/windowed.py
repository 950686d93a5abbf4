"""Groups are consumed almost in the order of their ids: a few may pass one that takes long."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Self

from streamrl.replay.orders.base import Order, slots_of

if TYPE_CHECKING:
    from streamrl.config.replay import ReplayConfig


class Windowed(Order):
    """Each pick is the lowest completed id of the W that begin with the oldest unconsumed one.

    So at most W - 1 groups pass a straggler, which is then waited for.

    >>> order = Windowed(groups_per_step=2, slots=4, window=3)  # S = 2
    >>> order.worst_staleness, order.select(0, {1: 0, 2: 0, 3: 0}, below=0, above=())
    (2, (1, 2))
    """

    uses = frozenset({"window"})
    reuses = True

    @classmethod
    def slots(cls, config: ReplayConfig) -> int:
        return super().slots(config) - (config.window - 1)

    @classmethod
    def check(cls, section: ReplayConfig) -> None:
        if section.slots < section.groups_per_step:
            widest = slots_of(section.bound, section.fresh) - section.groups_per_step + 1
            raise ValueError(
                f"window: {section.window} leaves {section.slots} slots, fewer than one step needs; "
                f"allowed: up to {widest} with replay.max_staleness={section.bound:g}"
            )

    @classmethod
    def of(cls, config: ReplayConfig) -> Self:
        return cls(config.groups_per_step, config.slots, config.window)

    def __init__(self, groups_per_step: int, slots: int, window: int) -> None:
        """Raises ValueError where the slots do not even hold one step, or the window no group."""
        super().__init__(groups_per_step, slots)
        if window < 1:
            raise ValueError(f"a window of {window} ids: at least 1 is needed")
        self.window = window

    @property
    def worst_staleness(self) -> int:
        return (self._slots + self.window - 2) // self.fresh

    def select(
        self,
        step: int,
        completed: Mapping[int, int | None],
        below: int,
        above: Container[int],
        groups: int | None = None,
    ) -> tuple[int, ...] | None:
        wanted = self.groups_per_step if groups is None else groups
        if len(completed) < wanted:
            return None
        picked: dict[int, None] = {}
        oldest = below
        while len(picked) < wanted:
            while oldest in above or oldest in picked:
                oldest += 1
            window = range(oldest, oldest + self.window)
            pick = next((i for i in window if i in completed and i not in picked), None)
            if pick is None:
                return None
            picked[pick] = None
        return tuple(picked)

"""Groups are consumed in the order of their ids."""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import count, islice

from streamrl.replay.orders.base import Order


class Fifo(Order):
    """In the order of ids: a straggler is waited for.

    >>> order = Fifo(groups_per_step=8, slots=24)  # S = 2
    >>> order.worst_staleness, order.admit(23, acknowledged=0), order.admit(24, acknowledged=0)
    (2, True, False)
    >>> order.required_step(24), order.select(1, dict.fromkeys(range(16)), below=8, above=())
    (1, (8, 9, 10, 11, 12, 13, 14, 15))
    """

    reuses = True

    @property
    def worst_staleness(self) -> int:
        return (self._slots - 1) // self.fresh

    def select(
        self,
        step: int,
        completed: Mapping[int, int | None],
        below: int,
        above: Container[int],
        groups: int | None = None,
    ) -> tuple[int, ...] | None:
        wanted = self.groups_per_step if groups is None else groups
        ids = tuple(islice((i for i in count(below) if i not in above), wanted))
        return ids if all(i in completed for i in ids) else None

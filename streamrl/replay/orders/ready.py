"""Groups are consumed in the order in which they complete."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Self

from streamrl.replay.orders.base import Order

if TYPE_CHECKING:
    from streamrl.config.replay import ReplayConfig
    from streamrl.replay.supply import Supply


class Ready(Order):
    """As groups complete, which favours short answers; for experiments.

    A group older than `bound` steps at its selection is generated again (`drop`), or trained as it is.

    >>> order = Ready(groups_per_step=2, slots=6, bound=2, drop=True)
    >>> order.select(3, {7: 2, 5: 1, 6: 3}, below=5, above=()), order.over_age(4, oldest=1)
    ((7, 5), True)
    """

    uses = frozenset({"over_age"})
    reuses = True

    @classmethod
    def of(cls, config: ReplayConfig) -> Self:
        return cls(config.groups_per_step, config.slots, math.ceil(config.bound), config.over_age == "drop")

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

    def required_step(
        self, group_id: int, step: int = 0, slots: int | None = None, supply: Supply | None = None
    ) -> int:
        """Where over-age groups are dropped, a ticket also has to meet the bound when it is taken next."""
        required = super().required_step(group_id, step, slots, supply)
        return max(required, step - self._bound) if self._drop else required

    def select(
        self,
        step: int,
        completed: Mapping[int, int | None],
        below: int,
        above: Container[int],
        groups: int | None = None,
    ) -> tuple[int, ...] | None:
        wanted = self.groups_per_step if groups is None else groups
        ids = tuple(islice(completed, wanted))
        return ids if len(ids) == wanted else None

    def over_age(self, step: int, oldest: int | None) -> bool:
        return self._drop and oldest is not None and step - oldest > self._bound

    def allows(self, group_id: int, oldest: int) -> bool:
        return True

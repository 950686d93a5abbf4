"""`fifo` with the bound 0: generation waits for every step's weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.replay.orders.fifo import Fifo

if TYPE_CHECKING:
    from streamrl.config.replay import ReplayConfig


class Synchronous(Fifo):
    """In the order of ids with the bound 0, whatever `replay.max_staleness` says: one step's groups are the slots."""

    reuses = False

    @classmethod
    def staleness(cls, config: ReplayConfig) -> float:
        return 0.0

"""Simulated time: what is to happen, and when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Seconds since the begin, and the events to come."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()  # what is put in first happens first at equal times

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Let it happen so many seconds from now."""
        self.at(self.now + seconds, action)

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Let it happen then."""
        heapq.heappush(self._events, (max(time, self.now), next(self._order), action))

    def step(self) -> None:
        """The next event."""
        self.now, _, action = heapq.heappop(self._events)
        action()

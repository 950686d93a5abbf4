"""Which answers go through the model together. Pure: the time is an argument, in seconds.

    WAITING ──▶ a batch: the oldest one, and of the others those of the nearest length, as far as the tokens go

A batch is due when its tokens are full, or its oldest answer has waited for long enough. The oldest answer is in every
batch, so that none waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """One prompt with its answer. Example: `Waiting([5, 7, 2], arrived=12.5)`."""

    ids: list[int]
    arrived: float
    whose: Any = None  # what is informed of the score


@dataclass(slots=True)
class Batches:
    """What waits.

    Usage:
        batches = Batches(tokens=16384, wait=0.005, most=4096)
        batches.add([Waiting([5, 7, 2], arrived=0.0)])  # True
        batches.due(now=0.0)  # 0.005
        batches.take()
    """

    tokens: int  # of one batch, padding included; no answer is longer
    wait: float  # seconds
    most: int  # that may wait
    waiting: list[Waiting] = field(default_factory=list)  # oldest first

    def add(self, items: Iterable[Waiting]) -> bool:
        """Add all items, or none where they would be too many. True where they were added."""
        items = list(items)
        if self.waiting and len(self.waiting) + len(items) > self.most:
            return False
        self.waiting += items
        return True

    def due(self, now: float) -> float | None:
        """Seconds until a batch is due, 0.0 where one is; None where nothing waits."""
        if not self.waiting:
            return None
        if len(self.waiting) * max(len(each.ids) for each in self.waiting) >= self.tokens:
            return 0.0
        return max(0.0, self.waiting[0].arrived + self.wait - now)

    def take(self, most: int | None = None) -> list[Waiting]:
        """The next batch, of `most` answers at most; empty where nothing waits."""
        if not self.waiting:
            return []
        oldest, others = self.waiting[0], self.waiting[1:]
        batch, longest = [oldest], len(oldest.ids)
        for each in sorted(others, key=lambda other: abs(len(other.ids) - len(oldest.ids))):
            longest = max(longest, len(each.ids))
            if longest * (len(batch) + 1) > self.tokens or (most is not None and len(batch) == most):
                break
            batch.append(each)
        taken = set(map(id, batch))
        self.waiting = [each for each in self.waiting if id(each) not in taken]
        return batch

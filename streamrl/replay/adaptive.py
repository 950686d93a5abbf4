"""The adaptive bound: how much of max_staleness is admitted now, by the off-policy effective sample size.

Pure: from the metric of each step it computes a number of slots. It acts on admission alone: what is out
comes back and is trained, so nothing is thrown away, and the proved bound stays that of all slots.
"""

from __future__ import annotations

from collections import deque

from streamrl.config.replay import AdaptiveConfig
from streamrl.replay.orders.base import Order


class AdaptiveBound:
    """Between the staleness that a publish every k steps needs and the configured one.

        mean ess of `patience` steps  < ess_low ─▶ lower by `change`      > ess_high ─▶ raise by `change`

    After a change the next `patience` steps are heard before another.
    """

    def __init__(self, config: AdaptiveConfig, order: Order, highest: float, publish_every: int = 1) -> None:
        """`highest` is the configured S; it is where the bound begins."""
        self._config = config
        self._order = order
        self._least = publish_every * order.groups_per_step  # slots: fewer would deadlock
        self._lowest = min(highest, (self._least + order.window - 1) / order.fresh - 1)
        self._highest = highest
        self._ess: deque[float] = deque(maxlen=config.patience)
        self._step = -1
        self.staleness = highest  # S that is admitted now, in learner steps
        self.slots = max(self._least, order.slots_at(highest)) if config.enabled else order.capacity  # of it

    def record(self, step: int, ess: float | None) -> None:
        """A learner step is trained. `ess` is its metric offpolicy/ess, None where it has none."""
        if not self._config.enabled or ess is None or step <= self._step:
            return
        self._step = step
        self._ess.append(ess)
        if len(self._ess) < self._config.patience:
            return
        mean = sum(self._ess) / len(self._ess)
        if mean < self._config.ess_low:
            self._move(-self._config.change)
        elif mean > self._config.ess_high:
            self._move(self._config.change)

    def metrics(self) -> dict[str, float]:
        """Nothing while the bound is not adaptive."""
        return {"staleness/admitted": self.staleness} if self._config.enabled else {}

    def _move(self, change: float) -> None:
        staleness = min(self._highest, max(self._lowest, self.staleness + change))
        if staleness != self.staleness:
            self.staleness = staleness
            self.slots = max(self._least, self._order.slots_at(staleness))  # never fewer than k steps need
            self._ess.clear()

"""The adaptive bound: how much of max_staleness is admitted now, as a controller says (`replay/controllers/`).

Pure: signals of each step come in, a number of slots comes out. It acts on admission alone: what is out comes back
and is trained, so nothing is thrown away, and the proved bound stays that of all slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from streamrl.config.replay import AdaptiveConfig
from streamrl.replay.controllers import make_controller
from streamrl.replay.controllers.base import Seen
from streamrl.replay.orders.base import Order
from streamrl.replay.records import Adapted


class AdaptiveBound:
    """Between the staleness that a publish every k steps needs and the configured one, whatever a controller says."""

    def __init__(self, config: AdaptiveConfig, order: Order, highest: float, publish_every: int = 1) -> None:
        """`highest` is the configured S; it is where the bound begins."""
        self._enabled = config.enabled
        self._name, self._controller = config.controller, make_controller(config)
        self._order = order
        self._least = publish_every * order.groups_per_step  # slots: fewer would deadlock
        self._lowest = min(highest, (self._least + order.window - 1) / order.fresh - 1)
        self._highest = highest
        self._step = -1
        self._moves: list[str] = []  # since the last `reason`
        self.staleness = highest  # S that is admitted now, in learner steps
        self.slots = order.capacity  # of it
        if self._enabled:
            self._admit(highest)

    def record(self, step: int, signals: Mapping[str, float]) -> Adapted | None:
        """A learner step is trained; `signals`: the metrics that the controller asks for. Returns a move, if any."""
        if not self._enabled or step <= self._step:
            return None
        self._step, former = step, self.staleness
        move = self._controller.judge(
            Seen(step=step, admitted=former, lowest=self._lowest, highest=self._highest, signals=signals)
        )
        if move is None:
            return None
        self._admit(move.staleness)
        if self.staleness == former:
            return None
        self._moves.append(f"{former:.3g} -> {self.staleness:.3g}: {move.reason}")
        memory = {name: float(value) for name, value in self._controller.memory().items()}
        return Adapted(
            step=step, former=former, staleness=self.staleness, reason=move.reason, memory=memory, controller=self._name
        )

    def restore(self, last: Adapted | None) -> None:
        """A service that was started again goes on from the last move; without one, from the configured bound."""
        if self._enabled and last is not None:
            self._step = last.step
            self._admit(last.staleness)
            if last.controller in ("", self._name):  # what another one remembers means something else
                self._controller.recall(last.memory)

    def metrics(self) -> dict[str, float]:
        """Nothing while the bound is not adaptive."""
        return {"staleness/admitted": self.staleness} if self._enabled else {}

    @property
    def lowered(self) -> int:
        """Learner steps by which the admitted staleness is below the configured one, each of them rounded up."""
        return math.ceil(self._highest) - math.ceil(self.staleness)

    def reason(self) -> str:
        """The moves since the last call, each with its reason; empty where there were none."""
        moves, self._moves = self._moves, []
        return "; ".join(moves)

    def _admit(self, staleness: float) -> None:
        self.staleness = min(self._highest, max(self._lowest, staleness))
        self.slots = max(self._least, self._order.slots_at(self.staleness))  # never fewer than k steps need

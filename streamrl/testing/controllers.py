"""What a controller of the adaptive bound must do: answer any signals, quickly, and go on after a restart.

from streamrl.testing.controllers import ControllerConformance

class TestByReward(ControllerConformance):
    name = "by_reward.py:ByReward"
"""

from __future__ import annotations

import math
import random
from typing import Any, ClassVar

from streamrl.choices import CONTROLLERS
from streamrl.config.replay import AdaptiveConfig
from streamrl.observe.metrics import is_known
from streamrl.replay.controllers import make_controller
from streamrl.replay.controllers.base import Controller, Move, Seen
from streamrl.testing.declarations import Conformance

STEPS = 400
HIGHEST = 8.0


class ControllerConformance(Conformance):
    """Give `name`, and what else the section `replay.adaptive` needs, such as its own options."""

    kind = CONTROLLERS
    settings: ClassVar[dict[str, Any]] = {}

    def test_it_asks_for_metrics_that_there_are(self) -> None:
        assert [name for name in self.declaration.signals if not is_known(name)] == []

    def test_every_move_is_a_number_with_a_reason_whatever_signals_there_are(self) -> None:
        for move in self._moves(self._controller()):
            assert math.isfinite(move.staleness)
            assert move.reason

    def test_what_it_remembers_can_be_recalled(self) -> None:
        former, later = self._controller(), self._controller()
        self._moves(former)
        memory = former.memory()
        assert all(math.isfinite(value) for value in memory.values())
        later.recall(memory)
        assert later.memory() == memory

    def _controller(self) -> Controller:
        return make_controller(
            AdaptiveConfig.model_validate({"enabled": True, "controller": self.name} | self.settings)
        )

    def _moves(self, controller: Controller) -> list[Move]:
        chance, admitted, moves = random.Random(1), HIGHEST, []
        for step in range(1, STEPS + 1):
            level = chance.random()
            signals = {name: level * chance.random() for name in self.declaration.signals if chance.random() < 0.9}
            seen = Seen(step=step, admitted=admitted, lowest=0.0, highest=HIGHEST, signals=signals)
            if (move := controller.judge(seen)) is not None:
                admitted = min(HIGHEST, max(0.0, move.staleness))
                moves.append(move)
        return moves

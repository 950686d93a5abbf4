"""Every prompt of an epoch once."""

from __future__ import annotations

from streamrl.replay.curricula.base import Curriculum


class Sequential(Curriculum):
    """Every prompt of an epoch once, in the order that the task's seed gives."""

    each_prompt_once = True

    def choose(self, task: str, count: int) -> int:
        return count

"""`of_task`: the reward of the task's own scorer."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.tasks.environment import Prompt, Rollout
from streamrl.tasks.rewards.base import Judge, Reward


class TaskReward(Reward):
    """The task's own reward."""

    async def scores(
        self, prompt: Prompt, rollouts: Sequence[Rollout], answers: Sequence[str], judge: Judge | None
    ) -> list[float | str]:
        return [rollout.reward for rollout in rollouts]

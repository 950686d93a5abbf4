"""`reward_model`: the score of the sequence classifier that is served beside (`reward_model.path`)."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.tasks.environment import Prompt, Rollout
from streamrl.tasks.rewards.base import Judge, Reward


class RewardModelReward(Reward):
    """The score of the reward model of `reward_model`, of the prompt and the answer's text."""

    asks_model = True

    async def scores(
        self, prompt: Prompt, rollouts: Sequence[Rollout], answers: Sequence[str], judge: Judge | None
    ) -> list[float | str]:
        assert judge is not None  # a rule of the configuration
        return await judge.scores(prompt, answers)

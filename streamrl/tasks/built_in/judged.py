"""The task `judged`: any task of one turn, whose answers a language model judges, alone or beside the task's scorer."""

from __future__ import annotations

from pydantic import Field

from streamrl.config.task import TaskShare
from streamrl.tasks.arguments import ARGUMENTS
from streamrl.tasks.environment import Around, Completion, Environment, Prompt, Score
from streamrl.tasks.failures import ScorerUnready, exceptions_of
from streamrl.tasks.model_judge import JudgeArguments, ModelJudge
from streamrl.tasks.starter import Starter

# The reward part that is the judge's score.
JUDGE = "judge"


class JudgedArguments(JudgeArguments):
    """Arguments of `judged`."""

    task: TaskShare = Field(description="the task whose prompts are asked")
    weight: float = Field(1.0, gt=0, le=1, description="of the judge in the reward; the rest is the task's own reward")


class Judged(Around):
    """Reward: weight x the judge's score + (1 - weight) x the task's own reward."""

    Arguments = JudgedArguments
    starter = Starter(
        args={
            "task": {"name": "reasoning_gym", "args": {"dataset": "chain_sum"}},
            "model": "models/judge",
            "engine_options": {"url": "http://127.0.0.1:30000/v1"},
        },
        max_new_tokens=64,
    )

    def __init__(self, arguments: JudgedArguments, task: Environment, seed: int, split: str) -> None:
        """Raises ValueError for a task of several turns, or a judge of groups, and an engine that cannot judge."""
        if task.has_turns:
            name = arguments.task.name
            raise ValueError(f"{ARGUMENTS}.task.name: {name} has turns of its own; allowed: a task of one turn")
        self._judge_by(task, arguments.task.name)
        self._judge = ModelJudge(arguments)
        self._weight = arguments.weight
        self.lowest_reward = min(0.0, task.lowest_reward)
        self.infrastructure = (*exceptions_of(task.infrastructure, "task"), ScorerUnready)

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """The task's scorer first: an answer on which it raises is not judged."""
        own = await self._task.score(prompt, completion)
        judged = await self._judge.score(prompt, completion.text)
        reward = self._weight * judged + (1 - self._weight) * own.reward
        return Score(reward=reward, parts={**own.parts, JUDGE: judged})

    async def close(self) -> None:
        await self._judge.close()
        await self._task.close()

"""The rows of a data set, judged by reward functions: a task of one turn.

class Task(FunctionTask):
    rewards = (RewardFunction(exact), RewardFunction(short, weight=0.1))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from streamrl.tasks.environment import Completion, Environment, Message, Prompt, Rollout, Score, check_reward
from streamrl.tasks.failures import INFRASTRUCTURE
from streamrl.tasks.functions.rewards import Answer, NoReward, RewardFunction, combined
from streamrl.tasks.messages import asked_of
from streamrl.tasks.order import item_at
from streamrl.tasks.rows import Rows, RowsArguments

# A column that makes rows with one prompt different questions, where an environment makes them so. No function sees it.
NUMBER = "__number__"


class FunctionArguments(RowsArguments):
    """Arguments of a task of functions."""

    prompt: str = Field("prompt", description="column of the prompts: text, asked as it is, or a list of chat messages")
    reward_right: float = Field(1.0, description="reward from which on an answer counts as wholly right")
    reward_failed: float = Field(0.0, description="reward of an answer on which a reward function raises")
    max_turns: int = Field(8, ge=1, description="turns of the policy, where there are tools or an environment")


class FunctionTask(Environment):
    """Reward: the weighted sum of what `rewards` say."""

    Arguments = FunctionArguments
    infrastructure = (*INFRASTRUCTURE, NoReward)
    size: int  # prompts of an epoch
    rewards: ClassVar[Sequence[RewardFunction]] = ()

    def __init__(self, arguments: FunctionArguments, seed: int, split: str) -> None:
        """Raises ValueError for rows that cannot be read, and a function with an argument that is no column."""
        self.arguments = arguments
        self.lowest_reward = arguments.reward_failed
        self._seed = seed
        asked = [arguments.prompt]
        self._rows = Rows(arguments, {"prompt": arguments.prompt}, asked, held_out=split == "probe", also=[NUMBER])
        self.size = len(self._rows)
        for reward in self.rewards:
            reward.check([column for column in self._rows[0] if column != NUMBER])

    @property
    def judges_groups(self) -> bool:
        """Is there a function of a batch? What it says of an answer may come from the others."""
        return any(reward.of_batch for reward in self.rewards)

    def row(self, index: int) -> dict[str, Any]:
        """The columns of prompt `index`."""
        row = self._rows[item_at(index, self.size, self._seed)]
        return {column: value for column, value in row.items() if column != NUMBER}

    def prompt(self, index: int) -> Prompt:
        row = self.row(index)
        asked = asked_of(row[self.arguments.prompt], index)
        if isinstance(asked, str):
            return Prompt(index=index, text=asked, metadata=row)
        return Prompt(index=index, messages=asked, metadata=row)

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        (judgement,) = await self.judge(prompt, [self.answer(prompt, completion)])
        if isinstance(judgement, Exception):
            raise judgement
        return judgement

    async def score_all(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Rollout]:
        """All answers of a group at once, but for those that were not given."""
        given = [each for each in completions if each.finish_reason != "abort"]
        judged = iter(await self.judge(prompt, [self.answer(prompt, each) for each in given]))
        return [
            Rollout(completion=each, reward=0.0)
            if each.finish_reason == "abort"
            else self.rollout(prompt, each, next(judged))
            for each in completions
        ]

    def answer(self, prompt: Prompt, completion: Completion) -> Answer:
        """As reward functions see it."""
        text = completion.text
        whole: str | list[Message] = text if prompt.messages is None else [Message(role="assistant", content=text)]
        return Answer(text, whole, completion.output_ids.tolist(), completion.finish_reason)

    async def judge(self, prompt: Prompt, answers: Sequence[Answer]) -> list[Score | Exception]:
        """The score of each answer, or what a reward function raised on it."""
        if not answers:
            return []
        row = prompt.metadata
        said = [await reward(prompt.content, answers, row) for reward in self.rewards]
        return [self._judged([words[place] for words in said]) for place in range(len(answers))]

    def rollout(self, prompt: Prompt, completion: Completion, judged: Score | Exception) -> Rollout:
        if isinstance(judged, Exception):
            return self.unscored(prompt, completion, judged)
        return Rollout(completion=completion, reward=judged.reward, parts=judged.parts)

    def _judged(self, said: Sequence[dict[str, float] | Exception | None]) -> Score | Exception:
        for words in said:
            if isinstance(words, Exception):
                return words
        try:
            score = combined(self.rewards, [each for each in said if not isinstance(each, Exception)], self._right)
            check_reward(score)
        except ValueError as error:
            return error
        return score

    @property
    def _right(self) -> float:
        return self.arguments.reward_right

"""Environments of several turns: what the policy says is answered by observations.

prompt ─▶ answer ─▶ observation ─▶ answer ─▶ ... ─▶ None or max_turns ─▶ reward of the trajectory
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import (
    Completion,
    Environment,
    Inference,
    Message,
    Prompt,
    Rollout,
    Score,
    check_reward,
)
from streamrl.tasks.episodes import together

# What an environment answers to a turn: text where the prompt is text, messages where it is messages.
Observation = str | Sequence[Message]


# The reward part that counts the policy's turns.
TURNS = "turns"


class TurnByTurn(Environment):
    """A task that answers the policy, up to `max_turns` times. It gives `prompt`, `observation` and rewards.

    The n samples of a group are conversations of their own, which run at the same time.
    """

    has_turns = True
    max_turns: int = 8

    @abstractmethod
    async def observation(self, prompt: Prompt, turns: Sequence[Completion]) -> Observation | None:
        """What the policy gets to read after its last turn; None ends the conversation. May raise, as `score` may."""

    async def turn_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> float:
        """What the last turn alone is worth; all turns are added up."""
        return 0.0

    @abstractmethod
    async def trajectory_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
        """What the whole conversation is worth, besides its turns. May raise, as `score` may."""

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """The judgement of a conversation of one turn."""
        return await self.score_turns(prompt, [completion])

    async def score_turns(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
        """The rewards of all turns and of the whole, added up. Raises what they raise, and ValueError for no number."""
        rewards = [await self.turn_reward(prompt, turns[: end + 1]) for end in range(len(turns))]
        whole = await self.trajectory_reward(prompt, turns)
        score = Score(reward=whole.reward + sum(rewards), parts={**whole.parts, TURNS: float(len(turns))})
        check_reward(score)
        return score

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        return await together(self._play(inference, prompt) for _ in range(n))

    async def _play(self, inference: Inference, prompt: Prompt) -> Rollout:
        """One sample. Errors of `inference` propagate, those of the task cost the reward."""
        conversation = Conversation(inference, prompt)
        while True:
            await conversation.generate()
            if conversation.ended:
                return Rollout(completion=conversation.completion, reward=0.0)
            try:
                if await self._goes_on(prompt, conversation):
                    continue
                score = await self.score_turns(prompt, conversation.turns)
            except Exception as error:  # the policy for foreign environments: count, log, go on
                return self.unscored(prompt, conversation.completion, error)
            return Rollout(completion=conversation.completion, reward=score.reward, parts=score.parts)

    async def _goes_on(self, prompt: Prompt, conversation: Conversation) -> bool:
        """Tell the policy what the environment says to its last turn; False where it says nothing more."""
        if len(conversation.turns) == self.max_turns:
            return False
        observation = await self.observation(prompt, conversation.turns)
        if observation is not None:
            conversation.add(observation)
        return observation is not None

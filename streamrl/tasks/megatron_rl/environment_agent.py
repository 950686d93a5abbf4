"""A task of streamrl as an agent: what an environment server needs to have of it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from pydantic import PrivateAttr

from streamrl.config.task import TaskShare
from streamrl.tasks.environment import Completion, Environment, Prompt, message_text
from streamrl.tasks.failures import ScorerRaised
from streamrl.tasks.megatron_rl.agents import EpisodeResult, GroupedRolloutRequest, RolloutRequest
from streamrl.tasks.megatron_rl.inference import LLMChatMessage
from streamrl.tasks.megatron_rl.reward_only import Prompted, RewardOnlyAgent
from streamrl.tasks.megatron_rl.rollouts import MASKED, Rollout, TokenRollout
from streamrl.tasks.registry import build_task

ENDLESS = 1 << 30  # prompts of a task without an end


class EnvironmentAgent(RewardOnlyAgent):
    """Draws the prompts of a task of one turn, and judges their answers as the task does."""

    _splits: dict[bool, Environment] = PrivateAttr(default_factory=dict)

    def __init__(self, share: TaskShare, seed: int) -> None:
        """Raises ValueError for arguments that do not fit, a task of several turns, and a judge of groups."""
        super().__init__(env_id=share.key)
        for validation in (True,) if share.evaluation_only else (False, True):
            self._splits[validation] = build_task(share, seed, "probe" if validation else "train")
        if self._splits[True].has_turns:
            raise ValueError(f"agent_type: {share.name} has several turns; allowed: an agent, or a task of one turn")
        if self._splits[True].judges_groups:
            raise ValueError(
                f"agent_type: {share.name} judges the answers of a group together; allowed: an agent, or a task that "
                "judges each answer alone (a class whose score_all does says judges_groups = False)"
            )

    async def get_prompt(self, validation: bool) -> tuple[Prompted, Any]:
        task = self._task(validation)
        return await self._prompted(validation, random.randrange(task.size or ENDLESS))

    async def evaluation_prompts(self, num_prompts: int, validation: bool = False) -> list[tuple[Prompted, Any]]:
        size = self._task(validation).size
        count = num_prompts if size is None else min(num_prompts, size)
        return [await self._prompted(validation, index) for index in range(count)]

    async def get_reward(self, response: str, golden: Any, finish_reason: str) -> float:
        """As the task judges the answer. Raises ScorerRaised for a scorer whose failure says nothing of it."""
        nothing = np.empty(0, np.int32)
        answer = Completion(
            text=response,
            prompt_ids=nothing,
            output_ids=nothing,
            logprobs=nothing.astype(np.float32),
            spans=(),
            finish_reason=finish_reason,
        )
        task, prompt = self._task(golden["validation"]), golden["prompt"]
        (judged,) = await task.score_all(prompt, [answer])
        if judged.masked:
            raise ScorerRaised(judged.failure or "", masked=True)
        return judged.reward

    async def _rollout_from_episode(
        self, request: RolloutRequest | GroupedRolloutRequest, episode: EpisodeResult, golden: Any
    ) -> Rollout | TokenRollout:
        """Masked where the scorer's failure says nothing of the answer: the others of its group have their rewards."""
        try:
            return await super()._rollout_from_episode(request, episode, golden)
        except ScorerRaised as lost:
            return self._rollout_of(
                request, episode, golden, reward=0.0, rollout_status=MASKED, failure_reason=str(lost)
            )

    async def close(self) -> None:
        for task in self._splits.values():
            await task.close()

    async def _prompted(self, validation: bool, index: int) -> tuple[Prompted, Any]:
        prompt = await self._task(validation).fetch(index)
        golden = {"prompt": prompt, "validation": validation, "problem_id": str(index)}
        return _asked(prompt), golden

    def _task(self, validation: bool) -> Environment:
        if validation not in self._splits:
            raise ValueError(f"validation: false is not allowed for {self.env_id}; allowed: true, it is for evaluation")
        return self._splits[validation]


def _asked(prompt: Prompt) -> Prompted:
    if prompt.messages is None:
        return prompt.text or ""
    return [LLMChatMessage(role=each["role"], content=message_text(each)) for each in prompt.messages]

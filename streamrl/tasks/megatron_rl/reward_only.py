"""Agents that give a prompt and a reward, and leave the episode and its evaluation to what is here.

get_prompt ─▶ answer ─▶ get_observation ─▶ answer ─▶ ... ─▶ done or max_turns ─▶ get_trajectory_reward
"""

from __future__ import annotations

import asyncio
import functools
from abc import ABC, abstractmethod
from math import comb
from typing import Any

from streamrl.tasks.megatron_rl.agents import (
    EpisodeResult,
    EvaluationAgent,
    EvaluationRequest,
    GroupedRolloutGenerator,
    GroupedRolloutRequest,
    GroupRolloutParams,
    RolloutGenerator,
    RolloutRequest,
)
from streamrl.tasks.megatron_rl.inference import (
    GenericGenerationArgs,
    InferenceResponse,
    LLMChatMessage,
    ReturnsTokens,
)
from streamrl.tasks.megatron_rl.rollouts import (
    EvaluationResponse,
    PassAtEvaluationResponse,
    PassAtEvaluationResult,
    RewardEvaluationResult,
    RewardOnlyEvaluationResponse,
    Rollout,
    TokenRollout,
)

Prompted = str | list[LLMChatMessage]

_GREEDY = GenericGenerationArgs(top_k=1, temperature=0.0, top_p=0.0)


def pass_at_k(n_samples: int, n_correct: int, k: int) -> float:
    """The chance that one of k answers is right, without bias (arXiv:2107.03374). Raises ValueError for k > n_samples.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 <= n_correct <= n_samples or k > n_samples:
        raise ValueError(f"k: {k} is not allowed with {n_correct} right of {n_samples}; allowed: up to {n_samples}")
    return 1.0 - comb(n_samples - n_correct, k) / comb(n_samples, k)


class PassAtEvaluationAgent(EvaluationAgent, ABC):
    """Evaluates each prompt `max_k` times, and once greedily."""

    def __init__(self, max_k: int = 32, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_k = max_k

    @abstractmethod
    async def _evaluation(
        self, prompt: Any, golden: Any, request: EvaluationRequest
    ) -> EvaluationResponse[RewardEvaluationResult]:
        """One answer to one prompt, judged."""

    async def evaluation(self, prompt: Any, golden: Any, request: EvaluationRequest) -> PassAtEvaluationResponse:
        """pass@1 and pass@`max_k` of one prompt: an answer passes whose reward is 1."""
        asked = (self._evaluation(prompt, golden, request) for _ in range(self.max_k))
        drawn = [result for response in await asyncio.gather(*asked) for result in response.results]
        greedy_args = request.generation_args.add(_GREEDY)
        (greedy,) = (
            await self._evaluation(prompt, golden, request.model_copy(update={"generation_args": greedy_args}))
        ).results
        passed = sum(result.reward == 1.0 for result in drawn)
        result = PassAtEvaluationResult(
            prompt=greedy.prompt,
            problem_id=_problem_id(golden),
            pass_at={k: pass_at_k(len(drawn), passed, k) for k in (1, self.max_k)},
            response=[each.response for each in drawn],
            reward=[each.reward for each in drawn],
            greedy_response=greedy.response,
            greedy_reward=greedy.reward,
        )
        return PassAtEvaluationResponse(results=[result], env_id=getattr(self, "env_id", None))


class RewardOnlyAgent(RolloutGenerator, GroupedRolloutGenerator, PassAtEvaluationAgent):
    """An agent of prompts and rewards. A subclass gives `get_prompt` and `get_reward`, and of several turns
    `max_turns` and `get_observation`.
    """

    env_id: str | None = None
    max_turns: int = 1

    def get_dataset(self, validation: bool = False) -> Any:
        """The rows of a split, for an agent's own use."""
        raise NotImplementedError(f"{type(self).__name__} has no get_dataset")

    async def get_prompt(self, validation: bool) -> tuple[Prompted, Any]:
        """A prompt, and what its answers are judged by."""
        raise NotImplementedError(f"{type(self).__name__} has no get_prompt")

    async def get_reward(self, response: str, golden: Any, finish_reason: str) -> float:
        """What one answer is worth."""
        raise NotImplementedError(f"{type(self).__name__} has no get_reward")

    async def evaluation_prompts(self, num_prompts: int, validation: bool = False) -> list[tuple[Prompted, Any]]:
        """The prompts of an evaluation, in a fixed order, each with what its answers are judged by."""
        raise NotImplementedError(f"{type(self).__name__} has no evaluation_prompts")

    async def get_observation(
        self, turn_idx: int, response: InferenceResponse, conversation: list[LLMChatMessage], golden: Any
    ) -> tuple[str | None, bool]:
        """What the policy reads after turn `turn_idx`, and whether the episode is over.

        `conversation`: the messages before the answer, which must not be changed.
        """
        return None, True

    async def get_trajectory_reward(
        self, responses: list[InferenceResponse], conversation: list[LLMChatMessage], golden: Any
    ) -> float | list[float]:
        """What the episode is worth, or each of its turns: the last answer's reward, unless a subclass says more."""
        last = responses[-1]
        return await self.get_reward(last.response.content, golden, last.finish_reason)

    async def prepare_group_rollout(self, request: GroupedRolloutRequest | RolloutRequest) -> GroupRolloutParams:
        prompt, golden = await self.get_prompt(validation=request.validation)
        return GroupRolloutParams(
            run_episode=functools.partial(self._run_episode, request, prompt=prompt, golden=golden),
            build_rollout=functools.partial(self._rollout_from_episode, request, golden=golden),
        )

    async def get_reward_rollouts(self, request: RolloutRequest) -> list[Any]:
        return list(await asyncio.gather(*(self._rollout(request) for _ in range(request.num_rollouts))))

    async def run_evaluation(self, request: EvaluationRequest) -> EvaluationResponse[Any]:
        prompts = list(await self.evaluation_prompts(request.num_prompts, validation=request.validation))
        prompts = prompts[: request.num_prompts]
        if request.rank_info is not None:
            rank, ranks = request.rank_info
            share = -(-len(prompts) // ranks)
            prompts = prompts[rank * share : (rank + 1) * share]
        responses = await asyncio.gather(*(self.evaluation(prompt, golden, request) for prompt, golden in prompts))
        results = [result for response in responses for result in response.results]
        return PassAtEvaluationResponse(results=results, env_id=self.env_id)

    async def _rollout(self, request: RolloutRequest) -> Rollout | TokenRollout:
        params = await self.prepare_group_rollout(request)
        return await params.build_rollout(await params.run_episode())

    async def _run_episode(
        self, request: RolloutRequest | GroupedRolloutRequest, *, prompt: Prompted, golden: Any
    ) -> EpisodeResult:
        """Raises ValueError for an episode that goes on without an observation."""
        asked, responses = prompt, list[InferenceResponse]()
        while True:
            inference_request = request.inference_interface.prepare_request(asked, request.generation_args)
            conversation = list(inference_request.prompt)
            response = await self.get_rollout_response(request, inference_request)
            responses.append(response)
            if len(responses) == self.max_turns:
                break
            observation, done = await self.get_observation(len(responses) - 1, response, conversation, golden)
            if done:
                break
            if not observation:
                raise ValueError(f"get_observation of {type(self).__name__} gave neither an observation nor the end")
            asked = [*conversation, response.response, LLMChatMessage(role="user", content=observation)]
        return EpisodeResult(responses=responses, conversation=[*conversation, response.response])

    async def _rollout_from_episode(
        self, request: RolloutRequest | GroupedRolloutRequest, episode: EpisodeResult, golden: Any
    ) -> Rollout | TokenRollout:
        reward: Any = await self.get_trajectory_reward(episode.responses, episode.conversation, golden)
        return self._rollout_of(request, episode, golden, reward=reward)

    def _rollout_of(
        self, request: RolloutRequest | GroupedRolloutRequest, episode: EpisodeResult, golden: Any, **judged: Any
    ) -> Rollout | TokenRollout:
        """`judged`: `reward`, `rollout_status` and `failure_reason`, as a rollout has them."""
        named = {"env_id": self.env_id or "", "problem_id": _problem_id(golden), **judged}
        if not isinstance(request.inference_interface, ReturnsTokens):
            return Rollout(trajectory=[response.raw_text or "" for response in episode.responses], **named)
        turns = [(response, response.token_ids or [], response.prompt_length or 0) for response in episode.responses]
        return TokenRollout(
            trajectory=[ids for _, ids, _ in turns],
            logprobs=[response.logprobs or [] for response, _, _ in turns],
            generation_mask=[[place >= start for place in range(len(ids))] for _, ids, start in turns],
            completion_ids=[response.completion_id or "" for response, _, _ in turns],
            **named,
        )

    async def _evaluation(self, prompt: Any, golden: Any, request: EvaluationRequest) -> RewardOnlyEvaluationResponse:
        inference_request = request.inference_interface.prepare_request(prompt, request.generation_args)
        answer = await self.get_rollout_response(request, inference_request)
        result = RewardEvaluationResult(
            prompt=prompt,
            response=answer.response,
            reward=await self.get_reward(answer.response.content, golden, answer.finish_reason),
            problem_id=_problem_id(golden),
        )
        return RewardOnlyEvaluationResponse(results=[result], env_id=self.env_id)


def _problem_id(golden: Any) -> str | None:
    found = golden.get("problem_id") if isinstance(golden, dict) else None
    return None if found is None else str(found)

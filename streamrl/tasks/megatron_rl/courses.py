"""How agents of each kind are asked for samples: one call of theirs is one play, which gives some rollouts.

kind            a play                                       rollouts of a play
groups          get_grouped_rollouts of one group            all
rewards         get_reward_rollouts of one rollout           1
games           the same between two players                 1 for each player, or 1
pairs           get_contrastive_rollouts of one pair         2, worth 1 and 0
evaluations     one prompt of the agent's evaluation         1 or more
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.tasks.megatron_rl.agents import (
    Agent,
    ContrastiveRolloutGenerator,
    EvaluationAgent,
    EvaluationRequest,
    GroupedRolloutGenerator,
    GroupedRolloutRequest,
    Head2HeadRolloutRequest,
    RolloutGenerator,
    RolloutRequest,
    TokenizedRolloutGenerator,
)
from streamrl.tasks.megatron_rl.inference import InferenceInterface, LLMChatMessage
from streamrl.tasks.megatron_rl.reward_only import PassAtEvaluationAgent
from streamrl.tasks.megatron_rl.rollouts import Rollout
from streamrl.tasks.megatron_rl.samples import AnyRollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What one play is for."""

    index: int  # of the prompt
    count: int  # samples of its group
    validation: bool  # of the held-out split
    prompts: int = 1  # of an evaluation
    prompt: Any = None  # of an evaluation that gives its prompts beforehand: (prompt, what it is judged by)


Play = Callable[[Any, Sequence[InferenceInterface], Wanted], Awaitable[list[AnyRollout]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """One kind of play."""

    play: Play
    players: int = 1  # interfaces of a play
    samples: int = 1  # of a play, at most; 0: all of a group
    evaluates: bool = False  # the prompts are those of the agent's evaluation


def course_of(agent: Agent, *, validation: bool, given: bool) -> Course | None:
    """What fits an agent; None for groups that `prepare_group_rollout` begins.

    given: its evaluation gives its prompts beforehand. Raises ValueError for an agent that only evaluates, where it is
    to be trained, and for one of no kind.
    """
    if validation and given:
        return Course(play=_judged_prompt, evaluates=True)
    if validation and isinstance(agent, EvaluationAgent) and not isinstance(agent, GroupedRolloutGenerator):
        passes = isinstance(agent, PassAtEvaluationAgent)
        return Course(play=_passes if passes else _evaluation, samples=int(not passes), evaluates=True)
    if hasattr(agent, "get_grouped_rollouts"):
        return Course(play=_group, samples=0)
    if isinstance(agent, GroupedRolloutGenerator):
        return None
    if isinstance(agent, ContrastiveRolloutGenerator):
        return Course(play=_pair, samples=2)
    if isinstance(agent, RolloutGenerator | TokenizedRolloutGenerator):
        return Course(play=_game, players=2, samples=2) if _is_game(agent) else Course(play=_reward)
    name = type(agent).__name__
    if isinstance(agent, EvaluationAgent):
        raise ValueError(f"task.name: {name} only evaluates; allowed: with evaluation_only: true")
    raise ValueError(f"task.name: {name} gives no rollouts; allowed: an agent of streamrl.tasks.megatron_rl")


async def _group(agent: Any, interfaces: Sequence[InferenceInterface], wanted: Wanted) -> list[AnyRollout]:
    request = GroupedRolloutRequest(
        num_groups=1,
        rollouts_per_group=wanted.count,
        inference_interface=interfaces[0],
        validation=wanted.validation,
    )
    groups: Any = agent.get_grouped_rollouts(request)
    if inspect.isawaitable(groups):
        groups = await groups
        return list(groups[0])
    async for group in groups:
        return list(group)
    return []


async def _reward(agent: Any, interfaces: Sequence[InferenceInterface], wanted: Wanted) -> list[AnyRollout]:
    request = RolloutRequest(num_rollouts=1, inference_interface=interfaces[0], validation=wanted.validation)
    return list(await agent.get_reward_rollouts(request))


async def _game(agent: Any, interfaces: Sequence[InferenceInterface], wanted: Wanted) -> list[AnyRollout]:
    request = Head2HeadRolloutRequest(
        num_rollouts=1, inference_interface=list(interfaces), validation=wanted.validation
    )
    return list(await agent.get_reward_rollouts(request))


async def _pair(agent: Any, interfaces: Sequence[InferenceInterface], wanted: Wanted) -> list[AnyRollout]:
    request = RolloutRequest(num_rollouts=1, inference_interface=interfaces[0], validation=wanted.validation)
    found: list[AnyRollout] = []
    for pair in await agent.get_contrastive_rollouts(request):
        found.append(Rollout(trajectory=pair.chosen_trajectory, reward=1.0))
        found.append(Rollout(trajectory=pair.rejected_trajectory, reward=0.0))
    return found


async def _judged_prompt(agent: Any, interfaces: Sequence[InferenceInterface], wanted: Wanted) -> list[AnyRollout]:
    prompt, golden = wanted.prompt
    request = EvaluationRequest(inference_interface=interfaces[0], num_prompts=1)
    return _rollouts((await agent._evaluation(prompt, golden, request)).results)


async def _evaluation(agent: Any, interfaces: Sequence[InferenceInterface], wanted: Wanted) -> list[AnyRollout]:
    """One rank of as many as there are prompts has one of them."""
    request = EvaluationRequest(
        inference_interface=interfaces[0],
        num_prompts=wanted.prompts,
        rank_info=(wanted.index % wanted.prompts, wanted.prompts),
    )
    return _rollouts((await agent.run_evaluation(request)).results)


async def _passes(agent: Any, interfaces: Sequence[InferenceInterface], wanted: Wanted) -> list[AnyRollout]:
    """All samples of a prompt at once: as many as its pass@k is of."""
    return await _evaluation(agent.model_copy(update={"max_k": wanted.count}), interfaces, wanted)


def _rollouts(results: Sequence[Any]) -> list[AnyRollout]:
    """The rollouts of results with one answer or several."""
    found: list[AnyRollout] = []
    for result in results:
        answers = result.response if isinstance(result.response, list) else [result.response]
        rewards = result.reward if isinstance(result.reward, list) else [result.reward]
        for answer, reward in zip(answers, rewards, strict=True):
            text = answer.content if isinstance(answer, LLMChatMessage) else str(answer)
            found.append(Rollout(trajectory=[text], reward=reward))
    return found


def _is_game(agent: Any) -> bool:
    """Whether `get_reward_rollouts` takes a request with several interfaces, as its annotation says."""
    method = agent.get_reward_rollouts
    try:
        hints = typing.get_type_hints(method)
    except Exception:  # of a name that is only there for a type checker: the text is what there is
        hints = dict(getattr(method, "__annotations__", {}))
    return any(hint is Head2HeadRolloutRequest or hint == Head2HeadRolloutRequest.__name__ for hint in hints.values())

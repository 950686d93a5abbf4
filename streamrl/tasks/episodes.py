"""Episodes of a group, played at the same time: how they end together, and what a group is in which none has begun."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from streamrl.tasks.environment import Completion, Inference, Prompt, Rollout

T = TypeVar("T")


class NotPlayed(RuntimeError):
    """An episode that gave no sample, or no reward; its text says why."""


async def together(samples: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each gives, in their order. Raises what the first one raises, once the others are cancelled and have ended.

    >>> async def sample(reward: float) -> float:
    ...     return reward
    >>> asyncio.run(together(sample(reward) for reward in (0.5, 1.0)))
    [0.5, 1.0]
    """
    tasks = [asyncio.ensure_future(each) for each in samples]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def unbegun(inference: Inference, prompt: Prompt, failure: str = "task") -> Completion:
    """The completion of an episode without an answer of the policy.

    failure: "task" where it has asked for none, "server" where the policy still owed one.
    """
    return Completion.failed(inference.prompt_ids(prompt.content), failure)


def begun(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The same rollouts. Raises NotPlayed where no episode asked anything: then the task has failed, not a sample."""
    if rollouts and all(each.completion.failure == "task" for each in rollouts):
        raise NotPlayed(rollouts[0].failure or "the environment asked the policy nothing")
    return list(rollouts)

"""Episodes of environments that ask by themselves: what a group is in which none has begun."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.tasks.environment import Completion, Inference, Prompt, Rollout


class NotPlayed(RuntimeError):
    """An episode that gave no sample, or no reward; its text says why."""


def unbegun(inference: Inference, prompt: Prompt) -> Completion:
    """Of an episode that has asked the policy nothing."""
    return Completion.failed(inference.prompt_ids(prompt.content), "task")


def begun(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The same rollouts. Raises NotPlayed where not one episode has begun: then the task has failed, not a sample."""
    if rollouts and all(each.completion.failure == "task" for each in rollouts):
        raise NotPlayed(rollouts[0].failure or "the environment asked the policy nothing")
    return list(rollouts)

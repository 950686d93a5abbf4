"""What a part of the reward declares, and what gives its scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from streamrl.choices import Choice, Options
from streamrl.tasks.environment import Prompt, Rollout


class Judge(Protocol):
    """The reward model that is served beside."""

    async def scores(self, prompt: Prompt, answers: Sequence[str]) -> list[float | str]:
        """For each answer its score, a finite number, or in one line why it has none.

        Raises ScorerUnready where no process has answered in `reward_model.patience`.
        """
        ...


class Reward(Choice, ABC):
    """One part of the reward; `task.rewards` weighs them. Its scores come without blocking the event loop."""

    asks_model: ClassVar[bool] = False
    """Does it ask the reward model?"""

    def __init__(self, options: Options) -> None:
        """`options`: checked against `Options`."""
        self.options = options

    @abstractmethod
    async def scores(
        self, prompt: Prompt, rollouts: Sequence[Rollout], answers: Sequence[str], judge: Judge | None
    ) -> list[float | str]:
        """For each rollout its score, or in one line why it has none: such a sample is masked, and counted.

        answers: their texts, without the reasoning where the run parses that. judge: None where no `reward_model` is
        configured. Raises what `Environment.infrastructure` names.
        """

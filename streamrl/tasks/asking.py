"""One prompt of a task, asked through an inference handle: the course of everyone who runs tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from streamrl.tasks.cut import Cut
from streamrl.tasks.environment import Environment, Inference, Prompt, Rollout
from streamrl.tasks.left_out import fitting_prompt


class Handle(Inference, Protocol):
    """An inference handle, for one prompt."""

    async def ids_of(self, prompt: Prompt) -> np.ndarray:
        """int32 [P] of a prompt, with all tokens of its images. Raises ValueError where it has none."""
        ...

    async def hold_images(self, references: Sequence[str]) -> None:
        """Read the images of the prompt that is asked now. Raises ValueError for what is no image."""

    def cut_prompt(self, prompt: Prompt, cut: Cut) -> None:
        """Cut the ids of this prompt, and of no other."""


async def find_prompt(task: Environment, inference: Handle, index: int) -> Prompt:
    """The prompt of `index`, of those that fit or are cut to fit. Raises whatever the task raises."""
    return await fitting_prompt(task, index, inference.ids_of)


async def roll_out(task: Environment, inference: Handle, prompt: Prompt, n: int) -> list[Rollout]:
    """`n` rollouts of a prompt.

    Raises ValueError for another number of rollouts, EngineError as `inference` does, and whatever the task raises.
    """
    await inference.hold_images(prompt.images)
    if task.cut is not None:
        inference.cut_prompt(prompt, task.cut)
    rollouts = await task.rollout_group(inference, prompt, n)
    if len(rollouts) != n:
        raise ValueError(f"the task gave {len(rollouts)} rollouts, {n} were asked for")
    return rollouts

"""What a curriculum is: it says which prompt is asked next.

It runs in the replay service, between two messages: it must be quick, and import no torch. Its choice is recorded with
the ticket, so that a restart asks what was asked; what it learned by `record` is in the process alone, and is lost with
the service.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from streamrl.choices import Choice, Options


class Curriculum(Choice, ABC):
    """Chooses prompts by their index; the task turns an index into a prompt."""

    each_prompt_once = False  # whether the audit may hold a second group of one prompt for a fault

    def __init__(self, seed: int, options: Options) -> None:
        """`seed`: of the run. `options`: those of `replay.curriculum_options`, of the class's own Options."""
        self.seed = seed
        self.options = options

    @abstractmethod
    def choose(self, task: str, count: int) -> int:
        """The prompt index, >= 0, of the `count`-th prompt (from 0) that this task is asked for."""

    def record(self, task: str, prompt_index: int, pass_rate: float) -> None:
        """A group of this prompt came back with this share of right answers."""

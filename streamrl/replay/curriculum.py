"""Which prompt is asked next: one after another, or as a class of the user's decides.

A class of one's own is named by `replay.curriculum: package.module:Class`, built as `Class(seed)`, and has the two
methods below. It runs in the replay service, between two messages: it must be quick, and import no torch. The
choice is recorded with the ticket, so that a restart asks what was asked; what a curriculum learned by `hear`
lives in the process alone, and starts anew with it.
"""

from __future__ import annotations

import importlib
from typing import Protocol


class Curriculum(Protocol):
    """Chooses prompts by their index; the task turns an index into a prompt."""

    def choose(self, task: str, count: int) -> int:
        """The prompt index, >= 0, of the `count`-th prompt (from 0) that this task is asked for."""

    def hear(self, task: str, prompt_index: int, pass_rate: float) -> None:
        """A group of this prompt came back with this share of right answers."""


class Sequential:
    """`sequential`: every prompt of an epoch once, in the order that the task's seed gives."""

    def __init__(self, seed: int) -> None:
        """A seed is not needed: the task shuffles."""

    def choose(self, task: str, count: int) -> int:
        return count

    def hear(self, task: str, prompt_index: int, pass_rate: float) -> None:
        """Nothing is learned."""


def make_curriculum(name: str, seed: int) -> Curriculum:
    """The curriculum of `replay.curriculum`. Raises ValueError where there is no such class."""
    if name == "sequential":
        return Sequential(seed)
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        raise ValueError(f"replay.curriculum: {name!r}; allowed: sequential, or package.module:Class")
    try:
        chosen = vars(importlib.import_module(module_name))[class_name]
    except (ImportError, KeyError) as error:
        raise ValueError(f"replay.curriculum: {name!r} cannot be loaded: {error!r}") from error
    missing = [method for method in ("choose", "hear") if not callable(getattr(chosen, method, None))]
    if missing:
        raise ValueError(f"replay.curriculum: {name!r} has no method {missing[0]}; see streamrl/replay/curriculum.py")
    curriculum: Curriculum = chosen(seed)
    return curriculum

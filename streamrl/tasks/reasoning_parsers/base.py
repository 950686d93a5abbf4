"""What tells the reasoning of an answer from the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from streamrl.choices import Choice, Options


class ReasoningParser(Choice, ABC):
    """One form of reasoning. It runs in the worker's event loop, on one answer at a time."""

    marks: ClassVar[bool] = False
    """Is the form written with special tokens? Then the text that it is given has them."""

    def __init__(self, options: Options) -> None:
        """`options`: checked against `Options`."""
        self.options = options

    @abstractmethod
    def split(self, text: str) -> tuple[str, str]:
        """(reasoning, what is left): the latter may hold calls, which a tool parser reads."""


def between(text: str, begin: str, end: str, *, opened: bool) -> tuple[str, str]:
    """The reasoning before `end`, with or without `begin` before it, and what is behind.

    opened: the prompt has written `begin`, so that without an end everything is reasoning.
    """
    before, mark, behind = text.partition(end)
    if mark:
        head, began, reasoning = before.partition(begin)
        return (reasoning if began else head).strip(), ((head if began else "") + behind).strip()
    head, began, reasoning = text.partition(begin)
    if began:  # cut in the middle of it
        return reasoning.strip(), head.strip()
    return (text.strip(), "") if opened else ("", text)

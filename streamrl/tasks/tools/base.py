"""What a tool is: a description for the policy, and an answer to each call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from streamrl.choices import Choice

if TYPE_CHECKING:
    from streamrl.tasks.built_in.tools import ToolsArguments


class Tool(Choice, ABC):
    """A tool of the task `tools`.

    One that a configuration names by its path is built as `Class()`, in processes of its own, which a call that takes
    longer than `task.args.seconds` ends.
    """

    description: ClassVar[str]
    """What the policy reads about it."""

    @classmethod
    def build(cls, arguments: ToolsArguments) -> Tool:
        """The tool with the limits of the task's arguments. Raises ValueError where it may not run here."""
        return cls()

    @abstractmethod
    async def call(self, argument: str) -> str:
        """The answer. Whatever is raised reaches the policy as an error."""

    async def close(self) -> None:
        """Release what it holds. May be called twice."""

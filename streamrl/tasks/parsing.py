"""What an answer says: its text, its reasoning and its calls, as the run's parsers read them.

answer ─▶ task.reasoning_parser ─▶ reasoning
                 └▶ task.tool_parser ─▶ calls, and the text that is left
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.config.task import TaskConfig
from streamrl.tasks.environment import Completion, Environment
from streamrl.tasks.failures import describe
from streamrl.tasks.reasoning_parsers.base import ReasoningParser
from streamrl.tasks.tool_parsers.base import Called, ToolParser, unreadable

# What a task is told of its run, wherever it runs.
KEYS = frozenset({"tool_parser", "tool_parser_options", "reasoning_parser", "reasoning_parser_options", "max_branches"})


@dataclass(frozen=True, slots=True)
class Said:
    """One answer. Example: `Said(text="so", reasoning="6*7", calls=[FunctionCall("add", {"a": 6})])`."""

    text: str
    reasoning: str
    calls: list[Called]


@dataclass(frozen=True, slots=True)
class Parsers:
    """The parsers of a run."""

    tools: ToolParser | None = None
    reasoning: ReasoningParser | None = None

    @classmethod
    def of(cls, config: TaskConfig) -> Parsers:
        return cls(_built(config, "tool_parser"), _built(config, "reasoning_parser"))

    @property
    def marks(self) -> bool:
        """Does one of them need the special tokens of an answer?"""
        return any(parser is not None and parser.marks for parser in (self.tools, self.reasoning))

    def thought(self, turn: Completion) -> tuple[str, str]:
        """(reasoning, what is left) of an answer."""
        text = (turn.marked if self.marks else None) or turn.text
        if self.reasoning is None:
            return "", text
        try:
            return self.reasoning.split(text)
        except Exception:  # the policy for parsers of a user's own: no answer ends a run
            return "", text

    def said(self, turn: Completion, tools: Sequence[dict[str, Any]] = ()) -> Said:
        """An answer in its parts. Whatever a parser raises is a call that cannot be read."""
        reasoning, text = self.thought(turn)
        if self.tools is None:
            return Said(text, reasoning, [])
        try:
            left, calls = self.tools.split(text, tools)
        except Exception as error:  # the policy for parsers of a user's own: no answer ends a run
            left, calls = text, [unreadable(f"the call cannot be read: {describe(error)}")]
        return Said(left, reasoning, calls)


def apply(task: Environment, config: TaskConfig) -> None:
    """Give a task the parsers of its run, and the number of branches that a rollout may have: KEYS of `config`."""
    task.parsers, task.max_branches = Parsers.of(config), config.max_branches


def _built(config: TaskConfig, key: str) -> Any:
    if getattr(config, key) is None:
        return None
    kind = config.chosen(key)
    return kind(kind.Options.model_validate(getattr(config, f"{key}_options")))

"""What a column of prompts holds, as a task asks it: plain text, or the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.tasks.arguments import ARGUMENTS
from streamrl.tasks.environment import Message


def asked_of(value: Any, index: int) -> str | tuple[Message, ...]:
    """The text or the messages of prompt `index`. Raises ValueError for a value that is neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ValueError(
            f"{ARGUMENTS}.prompt: the prompt of index {index} is {str(value)[:80]!r}; allowed: text, or a list of "
            'messages {"role": ..., "content": ...}'
        )
    # A column of a data set gives every message every key of any.
    return tuple(Message(**{key: value for key, value in each.items() if value is not None}) for each in value)  # type: ignore[typeddict-item]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value

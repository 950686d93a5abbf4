"""`harmony`: a message to `functions.NAME`, as gpt-oss writes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.tasks.harmony_messages import FUNCTIONS, HarmonyMessage, harmony_messages
from streamrl.tasks.tool_parsers.base import Called, ToolParser, of_arguments, unreadable


class Harmony(ToolParser):
    """Messages to a function; the text is that of the others."""

    marks = True

    def split(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Called]]:
        messages = harmony_messages(text)
        if messages is None:
            return text, []
        calls = [_call(message) for message in messages if message.recipient]
        return "\n".join(message.text for message in messages if not message.recipient).strip(), calls


def _call(message: HarmonyMessage) -> Called:
    name = message.recipient.removeprefix(FUNCTIONS)
    if name == message.recipient or not name:
        return unreadable(f"{message.recipient:.60} is no function; a call goes to={FUNCTIONS}NAME")
    return of_arguments(name, message.text.strip())

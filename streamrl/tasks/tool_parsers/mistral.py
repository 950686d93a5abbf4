"""`mistral`: `[TOOL_CALLS]` and a list of calls in JSON, or, of later models, a name and `[ARGS]` for each.

[TOOL_CALLS] [{"name": "add", "arguments": {"a": 6}}]
[TOOL_CALLS]add[ARGS]{"a": 6}[TOOL_CALLS]...            also with [CALL_ID]x before [ARGS]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.tasks.tool_parsers.base import Called, ToolParser, of_arguments, of_value, unreadable, values_of

MARK, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(ToolParser):
    """A mark, and JSON behind it."""

    marks = True

    def split(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Called]]:
        before, *parts = text.split(MARK)
        if not parts:
            return text, []
        return before.strip(), [call for part in parts for call in _calls(part)]


def _calls(part: str) -> list[Called]:
    head, mark, arguments = part.partition(ARGUMENTS)
    if mark:
        name = head.partition(CALL_ID)[0].strip()
        return [of_arguments(name, arguments.strip()) if name else unreadable("a call has a name before [ARGS]")]
    values, rest = values_of(part, "")
    found = [each for value in values for each in (value if isinstance(value, list) else [value])]
    calls = [of_value(each) for each in found]
    if rest.strip() or not calls:
        calls.append(unreadable(f"the calls are no JSON list: {rest.strip():.40}"))
    return calls

"""`glm`: a name, and a pair of tags for each argument, as GLM-4.5 and later write it.

<tool_call>add
<arg_key>a</arg_key>
<arg_value>6</arg_value>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from streamrl.tasks.tool_calls import FunctionCall
from streamrl.tasks.tool_parsers.base import Called, ToolParser, split_tagged, typed, unreadable

_INSIDE = r"((?:(?!<arg_key>).)*?)"  # ends before the next pair, so that a text is read once
_PAIR = re.compile(rf"<arg_key>([^<]*)</arg_key>\s*<arg_value>{_INSIDE}</arg_value>", re.S)


class Glm(ToolParser):
    """Arguments as pairs of tags; a text is written as it is, everything else as JSON."""

    def split(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Called]]:
        return split_tagged(text, lambda body: _call(body, tools))


def _call(body: str, tools: Sequence[dict[str, Any]]) -> Called:
    name = body.partition("<arg_key>")[0].strip()
    if not re.fullmatch(r"[\w.-]+", name):
        return unreadable("a call begins with the name of its tool")
    pairs = _PAIR.findall(body)
    if body.count("<arg_key>") != len(pairs) or _PAIR.sub("", body).strip() != name:
        return unreadable(f"the arguments of {name}: each is <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>")
    return FunctionCall(name, {key.strip(): typed(name, key.strip(), value, tools) for key, value in pairs})

"""`qwen_xml`: a tag for the function and one for each argument, as Qwen3-Coder writes it.

<tool_call>
<function=add>
<parameter=a>
6
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from streamrl.tasks.tool_calls import FunctionCall
from streamrl.tasks.tool_parsers.base import Called, ToolParser, split_tagged, typed, unreadable

_FUNCTION = re.compile(r"\s*<function=([\w.-]+)>(.*?)</function>\s*", re.S)
_INSIDE = r"((?:(?!<parameter=).)*?)"  # ends before the next one, so that a text is read once
_PARAMETER = re.compile(rf"<parameter=([^<>\n]+)>\n?{_INSIDE}\n?</parameter>", re.S)


class QwenXml(ToolParser):
    """Arguments in tags; a text is written as it is, everything else as JSON."""

    def split(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Called]]:
        return split_tagged(text, lambda body: _call(body, tools))


def _call(body: str, tools: Sequence[dict[str, Any]]) -> Called:
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return unreadable("a call is <function=NAME> ... </function>")
    name, inside = function[1], function[2]
    if _PARAMETER.sub("", inside).strip():
        return unreadable(f"the arguments of {name}: each is <parameter=KEY>VALUE</parameter>")
    return FunctionCall(name, {key: typed(name, key, value, tools) for key, value in _PARAMETER.findall(inside)})

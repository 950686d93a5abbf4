"""`deepseek`: calls between special tokens, as DeepSeek V3 and R1 (a code block) and V3.1 (JSON alone) write them.

<｜tool▁call▁begin｜>function<｜tool▁sep｜>add      <｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 6}<｜tool▁call▁end｜>
```json
{"a": 6}
```<｜tool▁call▁end｜>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from streamrl.tasks.tool_parsers.base import Called, ToolParser, of_arguments, unreadable

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|(?=<｜tool▁call▁begin｜>)|\Z)", re.S)
_BLOCK = re.compile(r"function<｜tool▁sep｜>([^\n`]+)\n```json\n(.*?)\n?```\s*", re.S)
_PLAIN = re.compile(r"([^\n<]+)<｜tool▁sep｜>(.*)", re.S)


class DeepSeek(ToolParser):
    """A name and JSON between special tokens."""

    marks = True

    def split(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Called]]:
        before, mark, inside = text.partition(BEGIN)
        if not mark:
            return text, []
        inside, _, behind = inside.partition(END)
        calls = [_call(match[1]) for match in _CALL.finditer(inside)]
        if not calls or _CALL.sub("", inside).strip():
            calls.append(unreadable("a call is <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"))
        return (before + behind).strip(), calls


def _call(body: str) -> Called:
    found = _BLOCK.fullmatch(body) or _PLAIN.fullmatch(body)
    if found is None:
        return unreadable("a call has a name, <｜tool▁sep｜> and its arguments in JSON")
    return of_arguments(found[1].strip(), found[2].strip())

"""`hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen2.5, Qwen3 and Hermes write it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from streamrl.tasks.tool_parsers.base import Called, ToolParser, of_json

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.S)


class Hermes(ToolParser):
    """JSON between tags."""

    def split(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Called]]:
        calls = [of_json(match[1]) for match in _CALL.finditer(text)]
        return (_CALL.sub("", text).strip() if calls else text), calls

"""`hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen2.5, Qwen3 and Hermes write it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.tasks.tool_parsers.base import Called, ToolParser, of_json, split_tagged


class Hermes(ToolParser):
    """JSON between tags."""

    def split(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Called]]:
        return split_tagged(text, of_json)

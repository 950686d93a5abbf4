"""`llama_json`: the whole answer is `{"name": ..., "parameters": {...}}`, as Llama 3.1 to 3.3 write it.

`<|python_tag|>` may come before it; several calls are separated by `;`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamrl.tasks.tool_parsers.base import Called, ToolParser, of_value, unreadable, values_of

TAG = "<|python_tag|>"


class LlamaJson(ToolParser):
    """JSON as the whole answer."""

    marks = True

    def split(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Called]]:
        before, tag, behind = text.partition(TAG)
        body, before = (behind, before.strip()) if tag else (before.strip(), "")
        if not tag and not body.startswith("{"):
            return text, []
        values, rest = values_of(body, ";,")
        meant = tag or body.lstrip("{ \n\t").startswith('"name"')
        if not meant and not any(isinstance(value, dict) and "name" in value for value in values):
            return text, []
        calls = [of_value(value, ("parameters", "arguments")) for value in values]
        if rest.strip():
            calls.append(unreadable(f"the call is no JSON: {rest.strip():.40}"))
        return before, calls

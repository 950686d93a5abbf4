"""`think`: `<think> ... </think>` before the answer, as Qwen3, GLM-4.5 and DeepSeek write it."""

from __future__ import annotations

from streamrl.tasks.reasoning_parsers.base import ReasoningParser, between


class Think(ReasoningParser):
    """Tags that the model writes; an answer without them has no reasoning."""

    def split(self, text: str) -> tuple[str, str]:
        return between(text, "<think>", "</think>", opened=False)

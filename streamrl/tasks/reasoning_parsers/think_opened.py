"""`think_opened`: the same where the prompt ends with `<think>`, as of DeepSeek-R1 and Qwen3's thinking models."""

from __future__ import annotations

from streamrl.tasks.reasoning_parsers.base import ReasoningParser, between


class ThinkOpened(ReasoningParser):
    """Everything before `</think>`; an answer that was cut before it is reasoning alone."""

    def split(self, text: str) -> tuple[str, str]:
        return between(text, "<think>", "</think>", opened=True)

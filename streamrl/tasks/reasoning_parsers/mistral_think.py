"""`mistral_think`: `[THINK] ... [/THINK]` before the answer, as Magistral writes it."""

from __future__ import annotations

from streamrl.tasks.reasoning_parsers.base import ReasoningParser, between


class MistralThink(ReasoningParser):
    """Special tokens that the model writes."""

    marks = True

    def split(self, text: str) -> tuple[str, str]:
        return between(text, "[THINK]", "[/THINK]", opened=False)

"""`harmony_analysis`: the messages of the channel `analysis`, as gpt-oss writes them."""

from __future__ import annotations

from streamrl.tasks.harmony_messages import HarmonyMessage, harmony_messages
from streamrl.tasks.reasoning_parsers.base import ReasoningParser

_CHANNEL = "analysis"


class HarmonyAnalysis(ReasoningParser):
    """What is left are the other messages: as they were written where one of them is a call, else their texts."""

    marks = True

    def split(self, text: str) -> tuple[str, str]:
        messages = harmony_messages(text)
        if messages is None:
            return "", text
        thought = [each for each in messages if _is_thought(each)]
        others = [each for each in messages if not _is_thought(each)]
        if any(each.recipient for each in others):
            left = "<|start|>".join(each.raw for each in others)
        else:
            left = "\n".join(each.text for each in others).strip()
        return "\n".join(each.text for each in thought).strip(), left


def _is_thought(message: HarmonyMessage) -> bool:
    return message.channel == _CHANNEL and not message.recipient

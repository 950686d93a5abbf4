"""`harmony_analysis`: the messages of the channel `analysis`, as gpt-oss writes them."""

from __future__ import annotations

from streamrl.tasks.harmony_messages import harmony_messages
from streamrl.tasks.reasoning_parsers.base import ReasoningParser

_CHANNEL = "analysis"


class HarmonyAnalysis(ReasoningParser):
    """What is left are the other messages: as they were written where one of them is a call, else their texts."""

    marks = True

    def split(self, text: str) -> tuple[str, str]:
        messages = harmony_messages(text)
        if messages is None:
            return "", text
        thought = [each for each in messages if each.channel == _CHANNEL and not each.recipient]
        others = [each for each in messages if each not in thought]
        if any(each.recipient for each in others):
            left = "<|start|>".join(each.raw for each in others)
        else:
            left = "\n".join(each.text for each in others).strip()
        return "\n".join(each.text for each in thought).strip(), left

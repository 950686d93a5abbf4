"""The messages of an answer in gpt-oss's harmony form: channel, recipient and text of each.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json
    <|message|>{"a": 6}<|call|>

The prompt ends with `<|start|>assistant`, so that an answer begins inside of its first message's header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MESSAGE, CHANNEL = "<|message|>", "<|channel|>"
_START = "<|start|>"
_ENDS = re.compile(r"<\|(?:end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")

FUNCTIONS = "functions."


@dataclass(frozen=True, slots=True)
class HarmonyMessage:
    """One message. Example: `HarmonyMessage("commentary", "functions.add", '{"a": 6}', raw)`."""

    channel: str  # analysis, commentary, final; empty where none is named
    recipient: str  # of a call; else empty
    text: str
    raw: str  # as it was written, without the start of its header


def harmony_messages(text: str) -> list[HarmonyMessage] | None:
    """The messages of an answer, in order; None for a text that is not in this form.

    >>> [each.text for each in harmony_messages("<|channel|>final<|message|>42<|return|>")]
    ['42']
    """
    if MESSAGE not in text:
        return None
    found = []
    for part in text.split(_START):
        head, mark, body = part.partition(MESSAGE)
        if mark:
            channel = re.match(r"\s*\w+", head.partition(CHANNEL)[2])
            recipient = _RECIPIENT.search(head)
            plain = _ENDS.split(body, maxsplit=1)[0]
            found.append(
                HarmonyMessage(channel[0].strip() if channel else "", recipient[1] if recipient else "", plain, part)
            )
    return found

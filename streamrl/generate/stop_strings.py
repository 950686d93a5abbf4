"""Stop strings, found where the text is: in the worker, which has the tokenizer that its servers do without.

    pieces ──search──▶ a stop string is there ─▶ the request is ended ─▶ Answer up to the token that completes it

The tokens of an answer are those up to the one that completes the string, which are what the policy drew until then,
and its text is that of its tokens. A stop string that is a special token of the model's is a stop token.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Protocol

from msgspec.structs import replace

from streamrl.engine.answers import Answer, FinishReason

# Tokens of a piece of an answer that a stop string may end: so many may be drawn in vain.
EVERY = 16


class Texts(Protocol):
    """What gives the text of tokens (`generate/tokenizer.py`)."""

    def text(self, ids: Sequence[Sequence[int]]) -> list[str]: ...


class StopStrings:
    """The stop strings of one request.

    Usage:
        stop = StopStrings(["\\nObservation:"], tokenizer)
        stop.found([17, 4, 9], 0)  # whether the text of these tokens has one
        stop.cut(answer, prompt=12)
    """

    def __init__(self, strings: Sequence[str], tokenizer: Texts) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        # Every token but a special one has a byte at least, and the first of a window may be the rest of a character.
        self._before = max(len(each.encode()) for each in strings) + 4

    def found(self, ids: Sequence[int], start: int) -> bool:
        """Is a string completed at or behind token `start`?"""
        return self._has(ids[max(0, start - self._before) :])

    def cut(self, answer: Answer, prompt: int) -> Answer:
        """The answer up to the token that completes the first string; as it is where it has none.

        prompt: tokens of the request.
        """
        length = self._length(answer.output_ids)
        return answer if length is None else _cut(answer, length, prompt)

    def _length(self, ids: Sequence[int]) -> int | None:
        """Tokens up to the one that completes a string; None where none is there."""
        done = 0
        while done < len(ids):
            end = min(len(ids), done + EVERY)
            window = max(0, done - self._before)
            if self._has(ids[window:end]):
                return next(place for place in range(done + 1, end + 1) if self._has(ids[window:place]))
            done = end
        return None

    def _has(self, ids: Sequence[int]) -> bool:
        (text,) = self._tokenizer.text([ids])
        return any(each in text for each in self._strings)


def _cut(answer: Answer, length: int, prompt: int) -> Answer:
    meta = answer.meta_info
    experts = meta.routed_experts
    if experts is not None:
        read = base64.b64decode(experts)
        row = len(read) // max(1, prompt + len(answer.output_ids) - 1)  # the last token is never read
        experts = base64.b64encode(read[: row * (prompt + length - 1)]).decode()
    sets, logprobs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    spans = tuple(replace(span, end=min(span.end, length)) for span in meta.weight_versions if span.start < length)
    return Answer(
        output_ids=answer.output_ids[:length],
        meta_info=replace(
            meta,
            finish_reason=FinishReason("stop"),
            weight_versions=spans,
            output_token_logprobs=meta.output_token_logprobs[:length],
            routed_experts=experts,
            output_token_sampling_mask=None if sets is None else sets[:length],
            output_token_sampling_logprobs=None if logprobs is None else logprobs[:length],
        ),
    )

"""One answer in parts: cut by an update of its server, and gone on with from its last token.

    part 1: prompt               ─▶ a b c ✂
    part 2: prompt a b c         ─▶ d e f stop
    answer:                         a b c d e f         log-probs and version spans joined in the same way

Pure: it is given the parts and asked for the next request. What was drawn is never drawn again, so that each token
keeps the log-prob and the version with which it was drawn.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from streamrl.engine.client import Answer, AnswerMeta, FinishReason, WeightVersionSpan

LENGTH = FinishReason("length")


class Continuation:
    """An answer under way.

    >>> answer = Continuation([5, 6], {"max_new_tokens": 8})
    >>> answer.take(part)  # 17, 4, 9 and an abort
    >>> answer.rest()
    ([5, 6, 17, 4, 9], {'max_new_tokens': 5})
    """

    def __init__(self, prompt: Sequence[int], sampling: dict[str, Any]) -> None:
        """`prompt` ids and SGLang's sampling parameters of the whole answer, `max_new_tokens` among them."""
        self._prompt = prompt
        self._sampling = sampling
        self._id = ""
        self._ids: list[int] = []
        self._logprobs: list[tuple[float, int, str | None]] = []
        self._spans: list[WeightVersionSpan] = []
        self._experts: bytes | None = None  # int32 [tokens read, layers, top_k]
        self._finish: FinishReason | None = None

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    @property
    def finished(self) -> bool:
        """The answer has come to an end of its own."""
        return self._finish is not None and self._finish.type != "abort"

    def take(self, part: Answer) -> None:
        """What a server answered to the prompt, or to `rest`."""
        meta, before = part.meta_info, len(self._ids)
        self._id = self._id or meta.id
        self._ids += part.output_ids
        self._logprobs += meta.output_token_logprobs
        for span in meta.weight_versions:
            self._append(span.version, before + span.start, before + span.end)
        if meta.routed_experts is not None:
            self._read(base64.b64decode(meta.routed_experts))
        self._finish = meta.finish_reason
        if not self.finished and len(self._ids) >= self._sampling["max_new_tokens"]:
            self._finish = LENGTH  # it was cut behind its last token

    def rest(self) -> tuple[list[int], dict[str, Any]]:
        """Input ids and sampling parameters of the request for what is missing."""
        missing = self._sampling["max_new_tokens"] - len(self._ids)
        return [*self._prompt, *self._ids], {**self._sampling, "max_new_tokens": missing}

    def answer(self) -> Answer:
        """The whole answer, as an uninterrupted server would have given it."""
        meta = AnswerMeta(
            id=self._id,
            finish_reason=self._finish or FinishReason("abort", "no part of it was answered"),
            weight_versions=tuple(self._spans),
            output_token_logprobs=self._logprobs,
            routed_experts=None if self._experts is None else base64.b64encode(self._experts).decode(),
        )
        return Answer(output_ids=self._ids, meta_info=meta)

    def _append(self, version: str, start: int, end: int) -> None:
        """A span behind the others; neighbours of one version are one."""
        if end > start and self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        if end > start:
            self._spans.append(WeightVersionSpan(version, start, end))

    def _read(self, experts: bytes) -> None:
        """The experts of every token that the server read for this part, the prompt and former parts among them.

        Former parts were read anew, perhaps by newer weights; what was recorded when their tokens were drawn stays.
        """
        known = self._experts or b""
        self._experts = known + experts[len(known) :]

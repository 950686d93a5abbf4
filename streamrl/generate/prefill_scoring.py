"""Behaviour log-probs of a finished answer by one prefill of prompt and answer (`generate.score`).

    prefill        what the server has cached of the prompt is used
    full_prefill   nothing is: the arithmetic of the learner's pass with `learner.as_served`, to the bit (float32, CPUs)

    last token ─▶ prefill at the same server ─▶ one version, that of every token ─▶ its log-probs
                                             └▶ another one, or it failed ────────▶ those of decode stay

It begins with the end of each answer, beside the requests that go on; the group waits for it. The server batches what
comes together.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineError
from streamrl.generate.continuation import Continuation
from streamrl.generate.inference import ServerPolicy

log = logging.getLogger(__name__)


class PrefillScoring:
    """The prefills of one request's answers. `close` it.

    Usage:
        scoring = PrefillScoring(prompt)
        scoring.begin(answer, policy)
        await scoring.finished()
        scoring.scored(answer)  # with the log-probs of the prefill, or as it was drawn
    """

    def __init__(self, prompt: Sequence[int], *, cached: bool = True) -> None:
        """`cached`: what the server has of the prompt is used."""
        self._prompt = prompt
        self._cached = cached
        self._running: dict[Continuation, asyncio.Task[list[float] | None]] = {}

    def begin(self, continuation: Continuation, policy: ServerPolicy) -> None:
        """An answer has come to its end at a server. One that several versions have drawn stays as it is."""
        answer = continuation.answer()
        spans = answer.meta_info.weight_versions
        if continuation not in self._running and len(spans) == 1 and spans[0].exact:
            ids = [*self._prompt, *answer.output_ids]
            self._running[continuation] = asyncio.ensure_future(self._prefill(ids, spans[0].version, policy))

    async def finished(self) -> None:
        """Wait for all that has begun."""
        if self._running:
            await asyncio.wait(self._running.values())

    def close(self) -> None:
        """End what is under way: those answers stay as they are."""
        for task in self._running.values():
            task.cancel()

    def scored(self, continuation: Continuation) -> Answer:
        """The answer as it goes on."""
        answer, task = continuation.answer(), self._running.get(continuation)
        logprobs = task.result() if task is not None and task.done() else None
        if logprobs is None:
            return answer
        meta = answer.meta_info
        named = [(each, *entry[1:]) for each, entry in zip(logprobs, meta.output_token_logprobs, strict=True)]
        return replace(answer, meta_info=replace(meta, output_token_logprobs=named, by_prefill=True))

    async def _prefill(self, ids: Sequence[int], version: str, policy: ServerPolicy) -> list[float] | None:
        try:
            scores = await policy.score(ids, len(self._prompt), cached=self._cached)
        except EngineError as error:
            log.info("an answer keeps the log-probs of decode: %s", error)
            return None
        if not all(map(math.isfinite, scores.logprobs)):
            log.warning("an answer keeps the log-probs of decode: a prefill gave some that are no number")
            return None
        return scores.logprobs if scores.version == version else None


def can_be_scored(sampling: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether a prefill gives the log-probs of the distribution that a request draws from."""
    whole = sampling.get("temperature", 1.0) == 1.0 and not options.get("kept_sets")
    return whole and not options.get("images")

"""A policy whose answers outlive interruptions: what an update cut off is asked for again from its last token.

    generate ─▶ server ─▶ finished answers ──────────────────────────────▶ whole answers
                  ▲      └▶ aborted ones ─▶ Continuation ─▶ prompt + prefix ─┐
                  └──────────────────────── behind the gate, after the update ◀┘

For `publish.interruption: abort`. Versions only rise within an answer, because those of its server do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from streamrl.engine.client import Answer, EngineError
from streamrl.generate.continuation import Continuation

if TYPE_CHECKING:
    from streamrl.generate.inference import Policy

STALLS = 8
# parts in a row that may bring no token: a request that waits for its turn is cut by every update, but one that is
# always cut before it begins has another cause, and is given up.


class ContinuingPolicy:
    """A `Policy` (generate/inference.py) over one that aborts requests while weights change."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._ended: set[str] = set()  # requests that are to end where they are

    async def generate(
        self, input_ids: Sequence[int], sampling: dict[str, Any], n: int, request_id: str | None = None, **options: Any
    ) -> list[Answer]:
        """`n` answers, each whole, or an abort where it was ended by its id or the server refuses to go on."""
        try:
            answers = await self._policy.generate(input_ids, sampling, n, request_id, **options)
            if all(answer.meta_info.finish_reason.type != "abort" for answer in answers):
                return answers
            joined = [Continuation(input_ids, sampling) for _ in answers]
            for continuation, answer in zip(joined, answers, strict=True):
                continuation.take(answer)
            await asyncio.gather(*(self._finish(continuation, request_id, options) for continuation in joined))
            return [continuation.answer() for continuation in joined]
        finally:
            self._ended.discard(request_id or "")

    async def abort(self, request_id: str = "") -> None:
        """End a request for good."""
        if request_id:
            self._ended.add(request_id)
        await self._policy.abort(request_id)

    async def _finish(self, answer: Continuation, request_id: str | None, options: dict[str, Any]) -> None:
        """Ask for the rest of an answer until it is whole."""
        stalls = 0
        while not answer.finished and request_id not in self._ended and stalls < STALLS:
            before = len(answer)
            try:
                (part,) = await self._policy.generate(*answer.rest(), 1, request_id, **options)
            except EngineError as error:
                if error.status is None and not error.late:
                    raise
                return  # refused, as its first part would have been: it stays an abort
            answer.take(part)
            stalls = stalls + 1 if len(answer) == before else 0

"""One server, for requests that no other may answer: an evaluation's, which are all of the version that it has.

    pieces ─▶ a stop string is among them ─▶ the server ends the request ─▶ the answer

A group's requests go on elsewhere when their server is lost (`requests.py`); these fail with it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from streamrl.engine.answers import Answer, Piece
from streamrl.generate.continuation import Continuation
from streamrl.generate.inference import Policy
from streamrl.generate.requests import end_request, without_faults
from streamrl.generate.served import ServedModel
from streamrl.generate.stop_strings import EVERY, StopStrings
from streamrl.types import PolicyVersion


class OneServer:
    """A `Policy` (generate/inference.py) whose answers end at their stop strings.

    Usage:
        policy = OneServer.of(served)
        answers = await policy.generate(ids, {"max_new_tokens": 512}, 1, ends=StopStrings(["Observation:"], tokenizer))
    """

    def __init__(self, policy: Policy, version: PolicyVersion) -> None:
        """`policy` of the server, which keeps `version` as long as it is asked here."""
        self._policy = policy
        self._version = version

    @classmethod
    def of(cls, served: ServedModel) -> OneServer:
        return cls(served.policy, served.version)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: dict[str, Any],
        n: int,
        request_id: str | None = None,
        *,
        ends: StopStrings | None = None,
        **options: Any,
    ) -> list[Answer]:
        """As `Policy` has it; with `ends`, one answer alone. Raises EngineError, PartlyAnswered for a contradiction."""
        if ends is None:
            return await self._policy.generate(input_ids, sampling, n, request_id, **options)
        name = request_id or uuid.uuid4().hex
        answer = Continuation(input_ids, sampling, ends.found)
        answer.begin(self._version)
        ending: list[asyncio.Task[None]] = []

        def add(piece: Piece) -> None:
            answer.add(piece)
            if not ending and answer.goes_on and answer.ended:
                ending.append(asyncio.create_task(end_request(self._policy, name)))

        in_pieces: dict[str, Any] = {**options, "pieces": add, "every": EVERY}
        try:
            await self._policy.generate(input_ids, sampling, 1, name, **in_pieces)
        finally:
            for task in ending:
                task.cancel()
        answer.cut()
        return without_faults([answer], [answer.answer()])

    async def abort(self, request_id: str = "") -> None:
        await self._policy.abort(request_id)

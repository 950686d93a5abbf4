"""An answer that a real server is drawing while a test does something to that server."""

from __future__ import annotations

import asyncio
from typing import Any

from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient
from streamrl.generate.adapters import AdapterPolicy
from streamrl.generate.continuation import Continuation
from streamrl.generate.gate import GatedPolicy
from streamrl.types import PolicyVersion

FIRST = PolicyVersion(0)
PIECE = 8  # tokens


class Drawing:
    """One answer to a request, which is seen as it comes.

    Usage:
        drawing = Drawing(client, [5, 6, 7], {"max_new_tokens": 300, "ignore_eos": True})
        await drawing.goes_on()  # what happens here happens in its middle
        answer = await drawing.whole()
    """

    def __init__(
        self,
        policy: EngineClient | AdapterPolicy | GatedPolicy,
        prompt: list[int],
        sampling: dict[str, Any],
        version: PolicyVersion = FIRST,
    ) -> None:
        """Ask a server that has `version`."""
        self._answer = Continuation(prompt, sampling)
        self._answer.begin(version)
        self._asking = asyncio.create_task(policy.generate(prompt, sampling, 1, every=PIECE, pieces=self._answer.add))

    @property
    def is_whole(self) -> bool:
        return self._asking.done()

    async def goes_on(self) -> None:
        """Until two further pieces have come: the first may have been on its way."""
        enough = len(self._answer) + 2 * PIECE
        while len(self._answer) < enough:
            assert not self.is_whole, f"it ended with {len(self._answer)} tokens"
            await asyncio.sleep(0.005)

    async def whole(self) -> Answer:
        await self._asking
        return self._answer.answer()

"""The gate that every request to a server goes through: closed, it holds new ones back and waits for those inside.

    request:           async with gate.pass_(): ...     waits while the gate is closed, until it is turned away
    `drain` interruption:  close ─▶ nothing is inside ─▶ update ─▶ open

One server, one gate, one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.engine.answers import Answer, PrefillScores
    from streamrl.generate.inference import ServerPolicy


class RequestGate:
    """Counts the requests inside, and lets none in while it is closed.

    Usage:
        gate = RequestGate()
        async with gate.pass_():
            answers = await client.generate(...)
    """

    def __init__(self) -> None:
        self._inside = 0
        self._is_open = True
        self._waiting: dict[asyncio.Future[bool], str | None] = {}  # may it try again?, by the name of who waits
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def inside(self) -> int:
        """Requests that have come in and not gone out."""
        return self._inside

    @property
    def is_open(self) -> bool:
        return self._is_open

    @contextlib.asynccontextmanager
    async def pass_(self, name: str | None = None) -> AsyncIterator[bool]:
        """Come in as soon as the gate is open, and go out at the end of the block, however it ends.

        False for a block that is not inside: who waited by this name was turned away.
        """
        if not await self._may_come_in(name):
            yield False
            return
        self._inside += 1
        self._empty.clear()
        try:
            yield True
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def _may_come_in(self, name: str | None) -> bool:
        while not self._is_open:  # it may have been closed again before this task ran
            again = asyncio.get_running_loop().create_future()
            self._waiting[again] = name
            try:
                if not await again:
                    return False
            finally:
                del self._waiting[again]
        return True

    def turn_away(self, name: str) -> None:
        """Who waits by this name waits no longer, and does not come in."""
        self._answer([again for again, waiting in self._waiting.items() if waiting == name], again=False)

    async def close(self, timeout: float | None) -> None:
        """Let nobody in any more and wait until nobody is inside; None: those inside have deadlines of their own.

        Raises TimeoutError after `timeout` seconds, and leaves the gate closed: `open` it, or wait again.
        """
        self._is_open = False
        async with asyncio.timeout(timeout):
            await self._empty.wait()

    def open(self) -> None:
        """Let requests in, those that wait first."""
        self._is_open = True
        self._answer(self._waiting, again=True)

    @staticmethod
    def _answer(waiting: Iterable[asyncio.Future[bool]], *, again: bool) -> None:
        for each in waiting:
            if not each.done():
                each.set_result(again)


class GatedPolicy:
    """A `Policy` (generate/inference.py) whose requests go through a gate."""

    def __init__(self, policy: ServerPolicy, gate: RequestGate) -> None:
        self._policy = policy
        self._gate = gate

    async def generate(
        self, input_ids: Sequence[int], sampling: dict[str, Any], n: int, request_id: str | None = None, **options: Any
    ) -> list[Answer]:
        """As of the policy; no answers where it is ended by its id while it waits."""
        async with self._gate.pass_(request_id) as is_inside:
            if not is_inside:
                return []
            return await self._policy.generate(input_ids, sampling, n, request_id, **options)

    async def score(self, *request: Any, **options: Any) -> PrefillScores:
        async with self._gate.pass_():
            return await self._policy.score(*request, **options)

    async def abort(self, request_id: str = "") -> None:
        self._gate.turn_away(request_id)
        await self._policy.abort(request_id)

"""The gate that every request to a server goes through: closed, it holds new ones back and waits for those inside.

    request:           async with gate.pass_(): ...     waits while the gate is closed
    `drain` interruption:  close ─▶ nothing is inside ─▶ update ─▶ open

One server, one gate, one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
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
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def inside(self) -> int:
        """Requests that have come in and not gone out."""
        return self._inside

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    @contextlib.asynccontextmanager
    async def pass_(self) -> AsyncIterator[None]:
        """Come in as soon as the gate is open, and go out at the end of the block, however it ends."""
        while not self._open.is_set():  # it may have been closed again before this task ran
            await self._open.wait()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    async def close(self, timeout: float) -> None:
        """Let nobody in any more and wait until nobody is inside.

        Raises TimeoutError after `timeout` seconds, and leaves the gate closed: `open` it, or wait again.
        """
        self._open.clear()
        async with asyncio.timeout(timeout):
            await self._empty.wait()

    def open(self) -> None:
        """Let requests in, those that wait first."""
        self._open.set()


class GatedPolicy:
    """A `Policy` (generate/inference.py) whose requests go through a gate."""

    def __init__(self, policy: ServerPolicy, gate: RequestGate) -> None:
        self._policy = policy
        self._gate = gate

    async def generate(self, *request: Any, **options: Any) -> list[Answer]:
        async with self._gate.pass_():
            return await self._policy.generate(*request, **options)

    async def score(self, *request: Any, **options: Any) -> PrefillScores:
        async with self._gate.pass_():
            return await self._policy.score(*request, **options)

    async def abort(self, request_id: str = "") -> None:
        await self._policy.abort(request_id)

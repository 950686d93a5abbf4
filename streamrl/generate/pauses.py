"""Why one server draws no tokens: it goes on when no reason is left.

A version that is loaded and the learner's turn on shared devices may come together, and end in either order.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto

from streamrl.engine.client import EngineClient, Interruption


class Reason(Enum):
    UPDATE = auto()  # its weights change, or an update has left them in parts
    ASLEEP = auto()  # the learner has the devices


class Pauses:
    """The pauses of one server.

    Usage:
        await pauses.begin(Reason.UPDATE, "retract")
        ...
        await pauses.end(Reason.UPDATE)  # the server draws again, unless it sleeps
    """

    def __init__(self, client: EngineClient, timeout: float) -> None:
        """`timeout`: seconds that one call may take."""
        self._client = client
        self._timeout = timeout
        self._reasons: set[Reason] = set()
        self._turn = asyncio.Lock()  # the server is told of one change after another

    def holds(self, reason: Reason) -> bool:
        """Has it begun, and not ended?"""
        return reason in self._reasons

    async def begin(self, reason: Reason, mode: Interruption) -> None:
        """Stop the server (EngineClient.pause). Raises EngineError; there is no new reason then."""
        async with self._turn:
            await self._client.pause(mode, self._timeout)
            self._reasons.add(reason)

    async def end(self, reason: Reason) -> None:
        """Let the server go on where this was the last reason. Raises EngineError."""
        async with self._turn:
            self._reasons.discard(reason)
            if not self._reasons:
                await self._client.resume(self._timeout)

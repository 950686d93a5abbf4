"""The clock of a call in a process that hosts a task: for how long it has asked the policy nothing.

runs ──waits for another call's turn──▶ stands ──has its own──▶ runs, from zero
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal

# Of the call that runs: told whether its clock runs, from zero, or stands. Where nobody hosts it, nobody listens.
CLOCK: ContextVar[Callable[[bool], None]] = ContextVar("clock", default=lambda runs: None)


def restart_clock() -> None:
    """What follows is timed by itself."""
    CLOCK.get()(True)


class UntimedLock(asyncio.Lock):
    """A lock for which the clock of a call stands while it waits."""

    async def acquire(self) -> Literal[True]:
        CLOCK.get()(False)
        try:
            return await super().acquire()
        finally:
            restart_clock()

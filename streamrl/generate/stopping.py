"""The orderly end of a generator worker."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Stopped(Exception):
    """The run is over, or this worker is to end: not an error."""


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Do `work` to its end, or until `stop` is set, which cancels it. True when it was stopped."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait((working,))
        return True
    working.result()  # raises what it raised
    return False

"""Requests by way of a router, which spreads them over the servers behind it; commands go to the servers themselves.

    request ─▶ generate.router ─▶ one of generate.attach, as the router likes
    weights, pause, abort ──────▶ each of generate.attach

A router passes on no command, and its own placement replaces this worker's: a request waits until every server is at
least at the version that it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient

ROUTER = "router"  # the name of the place of every request behind one


class RouterPolicy:
    """`Policy` (generate/inference.py) behind a router. `close` it."""

    def __init__(self, router: EngineClient, servers: Callable[[], Sequence[EngineClient]]) -> None:
        """`servers` tells the present clients of the servers behind it."""
        self._router = router
        self._servers = servers

    async def generate(self, *request: Any, **options: Any) -> list[Answer]:
        return await self._router.generate(*request, **options)

    async def abort(self, request_id: str = "") -> None:
        """At every server, because nobody knows which of them has the request."""
        await asyncio.gather(*(server.abort(request_id) for server in self._servers()))

    async def close(self) -> None:
        await self._router.close()

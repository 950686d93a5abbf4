"""The HTTP connections of a task to a server, of any number at once."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp


class HttpSession:
    """Connections that open with the first call, as many as there are calls at once. `close` it.

    A call that waited for another one's connection would lose of its own deadline meanwhile.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        """`headers`: of every call."""
        self._headers = headers
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """What makes the calls, all in the event loop that asks for it first."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def close(self) -> None:
        """May be called twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

"""A server whose addresses begin with a session: a call lives no longer than its client and its session.

    http://HOST:PORT/SESSION/... ─▶ call ─┬▶ answered
                                          ├▶ cancelled: the client has closed its connection
                                          └▶ cancelled, status 410: the session is over

A session's name cannot be guessed; it is its only protection.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from aiohttp import web

Session = TypeVar("Session")
Handler = Callable[[web.Request], Awaitable[web.Response]]

SHUTDOWN_TIMEOUT = 1.0  # seconds that a reply may still take when the server closes: no session is left by then


@dataclass(slots=True)
class _Served(Generic[Session]):
    session: Session
    calls: set[asyncio.Future[web.Response]] = field(default_factory=set)  # on their way


class SessionServer(ABC, Generic[Session]):
    """The server of one process. `close` it.

    Usage:
        await server.start()
        async with server.serving(session) as address: ...
    """

    largest: ClassVar[int]
    """Bytes of a call."""

    def __init__(self, host: str, port: int = 0) -> None:
        """Port 0 takes a free one."""
        self._host = host
        self._port = port
        self._sessions: dict[str, _Served[Session]] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    @abstractmethod
    def routes(self) -> Iterable[web.RouteDef]:
        """Paths that begin with `/{session}`, and their handlers, made by `within`."""

    async def start(self) -> None:
        """Listen, unless it does. Raises OSError where the address is not free."""
        async with self._starting:
            if self._runner is None:
                await self._listen()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=self.largest)
        app.add_routes(self.routes())
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_TIMEOUT)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner, self._port = runner, runner.addresses[0][1]

    @contextlib.asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[str]:
        """HOST:PORT/NAME of a session, until the end of the block; then its calls have been cancelled."""
        name, served = secrets.token_urlsafe(16), _Served(session)
        self._sessions[name] = served
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            yield f"{host}:{self._port}/{name}"
        finally:
            del self._sessions[name]
            for call in served.calls:
                call.cancel()
            await asyncio.gather(*served.calls, return_exceptions=True)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def within(self, method: Callable[[Session, web.Request], Awaitable[web.Response]]) -> Handler:
        """A handler that answers a call of a session. It raises HTTPNotFound and HTTPGone."""

        async def answer(request: web.Request) -> web.Response:
            name = request.match_info["session"]
            served = self._sessions.get(name)
            if served is None:
                raise web.HTTPNotFound(text="no such session, or it is over")
            call = asyncio.ensure_future(method(served.session, request))
            served.calls.add(call)
            try:
                return await call
            except asyncio.CancelledError:
                if name in self._sessions:  # the client has gone
                    raise
                raise web.HTTPGone(text="the session is over") from None
            finally:
                served.calls.discard(call)

        return answer

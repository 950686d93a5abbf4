"""The OpenAI-compatible endpoint of a run: existing agents talk to the policy, and every token is recorded behind it.

    http://HOST:PORT/SESSION/v1/{chat/completions, completions, models}

The session is in the address, so that an agent needs nothing but its base URL; its name cannot be guessed.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
from aiohttp import web

from streamrl.tasks.openai_protocol import MODEL, Call, ChatCall, TextCall, chat_reply, text_reply
from streamrl.tasks.openai_session import CallRefused, Session

LARGEST = 16 << 20  # bytes of a call


class OpenAIServer:
    """The endpoint of one process. `close` it.

    Usage:
        server = OpenAIServer("127.0.0.1", 0)
        await server.start()
        with server.serving(session) as base_url: ...
    """

    def __init__(self, host: str, port: int) -> None:
        """Port 0 takes a free one."""
        self._host = host
        self._port = port
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen, unless it does. Raises OSError where the address is not free."""
        async with self._starting:
            if self._runner is None:
                await self._listen()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=LARGEST)
        app.router.add_get("/{session}/v1/models", _answering(self._models))
        app.router.add_post("/{session}/v1/chat/completions", _answering(self._chat))
        app.router.add_post("/{session}/v1/completions", _answering(self._complete))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except BaseException:
            await runner.cleanup()
            raise
        self._runner, self._port = runner, runner.addresses[0][1]

    @contextlib.contextmanager
    def serving(self, session: Session) -> Iterator[str]:
        """The base URL under which an agent has `session`, until the end of the block."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = session
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            yield f"http://{host}:{self._port}/{name}/v1"
        finally:
            session.open = False
            del self._sessions[name]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "streamrl"}
        return _json(200, {"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.Response:
        session = self._session(request)
        call = msgspec.json.decode(await request.read(), type=ChatCall)
        messages = [message.message() for message in call.messages]
        turn, message = await session.chat(messages, call.offered(), **call.sampling())
        return _body(call, chat_reply(call, turn, message))

    async def _complete(self, request: web.Request) -> web.Response:
        session = self._session(request)
        call = msgspec.json.decode(await request.read(), type=TextCall)
        turn = await session.complete(call.prompt, **call.sampling())
        return _body(call, text_reply(call, turn))

    def _session(self, request: web.Request) -> Session:
        try:
            return self._sessions[request.match_info["session"]]
        except KeyError:
            raise CallRefused(404, "no such session, or it is over") from None


def _answering(method: Callable[[web.Request], Awaitable[web.Response]]) -> Any:
    """A handler that tells of an error in OpenAI's form."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return await method(request)
        except CallRefused as refused:
            return _json(refused.status, _error(refused))
        except (msgspec.DecodeError, ValueError) as error:
            return _json(400, _error(error))

    return answer


def _body(call: Call, body: bytes) -> web.Response:
    return web.Response(body=body, content_type="text/event-stream" if call.stream else "application/json")


def _json(status: int, body: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def _error(error: Exception) -> dict[str, Any]:
    return {"error": {"message": str(error)[:500], "type": "invalid_request_error", "param": None, "code": None}}

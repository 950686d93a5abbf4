"""The endpoint of a run: existing agents talk to the policy, and every token is recorded behind it.

    http://HOST:PORT/SESSION/v1/{chat/completions, completions, models}     OpenAI's protocol
    http://HOST:PORT/SESSION/v1/messages[/count_tokens]                     Anthropic's

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

from streamrl.tasks import anthropic_protocol, openai_protocol
from streamrl.tasks.anthropic_protocol import CountCall, MessagesCall, count_reply, message_reply
from streamrl.tasks.openai_protocol import MODEL, ChatCall, TextCall, chat_reply, text_reply
from streamrl.tasks.openai_session import CallRefused, Session

LARGEST = 16 << 20  # bytes of a call

# Clients of both protocols would send a call again that was refused; nothing that is refused here is a matter of time.
NOT_AGAIN = {"x-should-retry": "false"}

# Of (status, reason): the status and body by which a protocol tells of an error.
ErrorReply = Callable[[int, str], tuple[int, dict[str, Any]]]


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
        openai, anthropic = openai_protocol.error_reply, anthropic_protocol.error_reply
        app.router.add_get("/{session}/v1/models", _answering(self._models, openai))
        app.router.add_post("/{session}/v1/chat/completions", _answering(self._chat, openai))
        app.router.add_post("/{session}/v1/completions", _answering(self._complete, openai))
        app.router.add_post("/{session}/v1/messages", _answering(self._message, anthropic))
        app.router.add_post("/{session}/v1/messages/count_tokens", _answering(self._count, anthropic))
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
        return _body(msgspec.json.encode({"object": "list", "data": [model]}))

    async def _chat(self, request: web.Request) -> web.Response:
        session = self._session(request)
        call = msgspec.json.decode(await request.read(), type=ChatCall)
        messages = [message.message() for message in call.messages]
        turn, message = await session.chat(messages, call.offered(), **call.sampling())
        return _body(chat_reply(call, turn, message), call.stream)

    async def _complete(self, request: web.Request) -> web.Response:
        session = self._session(request)
        call = msgspec.json.decode(await request.read(), type=TextCall)
        turn = await session.complete(call.prompt, **call.sampling())
        return _body(text_reply(call, turn), call.stream)

    async def _message(self, request: web.Request) -> web.Response:
        session = self._session(request)
        call = msgspec.json.decode(await request.read(), type=MessagesCall)
        turn, message = await session.chat(call.conversation(), call.offered(), **call.sampling())
        return _body(message_reply(call, turn, message), call.stream)

    async def _count(self, request: web.Request) -> web.Response:
        session = self._session(request)
        call = msgspec.json.decode(await request.read(), type=CountCall)
        return _body(count_reply(await session.count(call.conversation(), call.offered())))

    def _session(self, request: web.Request) -> Session:
        try:
            return self._sessions[request.match_info["session"]]
        except KeyError:
            raise CallRefused(404, "no such session, or it is over") from None


def _answering(method: Callable[[web.Request], Awaitable[web.Response]], error_reply: ErrorReply) -> Any:
    """A handler that tells of an error in its protocol's form."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return await method(request)
        except CallRefused as refused:
            status, reason = refused.status, str(refused)
        except web.HTTPRequestEntityTooLarge as error:
            status, reason = 413, f"a call of more than {LARGEST} bytes: {error.text}"
        except (msgspec.DecodeError, ValueError) as error:
            status, reason = 400, str(error)
        status, body = error_reply(status, reason[:500])
        return _body(msgspec.json.encode(body), status=status, headers=NOT_AGAIN)

    return answer


def _body(body: bytes, stream: bool | None = False, **options: Any) -> web.Response:
    return web.Response(body=body, content_type="text/event-stream" if stream else "application/json", **options)

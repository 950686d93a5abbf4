"""The endpoint of a run: existing agents talk to the policy, and every token is recorded behind it.

    http://HOST:PORT/SESSION/v1/{chat/completions, completions, models}     OpenAI's protocol
    http://HOST:PORT/SESSION/v1/messages[/count_tokens]                     Anthropic's

The session is in the address, so that an agent needs nothing but its base URL.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec
from aiohttp import web

from streamrl.tasks import anthropic_protocol, openai_protocol
from streamrl.tasks.anthropic_protocol import CountCall, MessagesCall, count_reply, message_reply
from streamrl.tasks.openai_protocol import MODEL, ChatCall, TextCall, chat_reply, text_reply
from streamrl.tasks.openai_session import CallRefused, Session
from streamrl.tasks.session_server import Handler, SessionServer

# Clients of both protocols would send a call again that was refused; nothing that is refused here is a matter of time.
NOT_AGAIN = {"x-should-retry": "false"}

# Of (status, reason): the status and body by which a protocol tells of an error.
ErrorReply = Callable[[int, str], tuple[int, dict[str, Any]]]


class OpenAIServer(SessionServer[Session]):
    """The endpoint of one process. `close` it.

    Usage:
        server = OpenAIServer("127.0.0.1", 0)
        await server.start()
        async with server.serving(session) as base_url: ...
    """

    largest = 16 << 20

    def routes(self) -> Iterable[web.RouteDef]:
        openai, anthropic = openai_protocol.error_reply, anthropic_protocol.error_reply
        return [
            web.get("/{session}/v1/models", _answering(self.within(_models), openai)),
            web.post("/{session}/v1/chat/completions", _answering(self.within(_chat), openai)),
            web.post("/{session}/v1/completions", _answering(self.within(_complete), openai)),
            web.post("/{session}/v1/messages", _answering(self.within(_message), anthropic)),
            web.post("/{session}/v1/messages/count_tokens", _answering(self.within(_count), anthropic)),
        ]

    @contextlib.asynccontextmanager
    async def serving(self, session: Session) -> AsyncIterator[str]:
        """The base URL under which an agent has `session`, until the end of the block."""
        async with super().serving(session) as address:
            yield f"http://{address}/v1"


async def _models(session: Session, request: web.Request) -> web.Response:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "streamrl"}
    return _body(msgspec.json.encode({"object": "list", "data": [model]}))


async def _chat(session: Session, request: web.Request) -> web.Response:
    call = msgspec.json.decode(await request.read(), type=ChatCall)
    messages = [message.message() for message in call.messages]
    turn, message = await session.chat(messages, call.offered(), **call.sampling())
    return _body(chat_reply(call, turn, message), call.stream)


async def _complete(session: Session, request: web.Request) -> web.Response:
    call = msgspec.json.decode(await request.read(), type=TextCall)
    turn = await session.complete(call.prompt, **call.sampling())
    return _body(text_reply(call, turn), call.stream)


async def _message(session: Session, request: web.Request) -> web.Response:
    call = msgspec.json.decode(await request.read(), type=MessagesCall)
    turn, message = await session.chat(call.conversation(), call.offered(), **call.sampling())
    return _body(message_reply(call, turn, message), call.stream)


async def _count(session: Session, request: web.Request) -> web.Response:
    call = msgspec.json.decode(await request.read(), type=CountCall)
    return _body(count_reply(await session.count(call.conversation(), call.offered())))


def _answering(handler: Handler, error_reply: ErrorReply) -> Handler:
    """A handler that tells of an error in its protocol's form."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return await handler(request)
        except CallRefused as refused:
            status, reason = refused.status, str(refused)
        except web.HTTPRequestEntityTooLarge as error:
            status, reason = 413, f"a call of more than {OpenAIServer.largest} bytes: {error.text}"
        except (web.HTTPNotFound, web.HTTPGone) as error:
            status, reason = error.status, f"{error.text}"
        except (msgspec.DecodeError, ValueError) as error:
            status, reason = 400, str(error)
        status, body = error_reply(status, reason[:500])
        return _body(msgspec.json.encode(body), status=status, headers=NOT_AGAIN)

    return answer


def _body(body: bytes, stream: bool | None = False, **options: Any) -> web.Response:
    return web.Response(body=body, content_type="text/event-stream" if stream else "application/json", **options)

"""The OpenAI-compatible endpoint of a run: existing agents talk to the policy, and every token is recorded behind it.

    http://HOST:PORT/SESSION/v1/{chat/completions, completions, models}

The session is in the address, so that an agent needs to be told nothing but its base URL; its name cannot be guessed.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from streamrl.tasks.environment import Completion, Message
from streamrl.tasks.openai_session import CallRefused, Session

MODEL = "policy"
"""The name of the one model."""

LARGEST = 16 << 20  # bytes of a call


class _Call(msgspec.Struct, frozen=True):
    """What calls of both kinds may choose. Temperature and its like are the run's, and are passed over."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    n: int | None = 1
    stream: bool | None = False
    logprobs: bool | int | None = None

    def sampling(self) -> dict[str, Any]:
        """As `Inference.generate` takes it. Raises CallRefused for what the endpoint does not do."""
        if self.n not in (None, 1):
            raise CallRefused(400, f"n: {self.n} is not allowed; allowed: 1, a session is one sample")
        if self.stream:
            raise CallRefused(400, "stream: true is not allowed; allowed: false")
        longest = self.max_completion_tokens or self.max_tokens
        chosen: dict[str, Any] = {} if longest is None else {"max_new_tokens": longest}
        return chosen if self.stop is None else {**chosen, "stop": self.stop}


class _Part(msgspec.Struct, frozen=True):
    """A part of a message's content; only text is understood."""

    type: str
    text: str = ""


class _Said(msgspec.Struct, frozen=True):
    role: str
    content: str | list[_Part]


class _ChatCall(_Call, frozen=True, kw_only=True):
    messages: Annotated[list[_Said], Meta(min_length=1)]
    tools: list[Any] | None = None


class _TextCall(_Call, frozen=True, kw_only=True):
    prompt: str


class OpenAIServer:
    """The endpoint of one process. `close` it.

    >>> server = OpenAIServer("127.0.0.1", 0)
    >>> await server.start()
    >>> with server.serving(session) as base_url: ...
    """

    def __init__(self, host: str, port: int) -> None:
        """Port 0 takes a free one."""
        self._host = host
        self._port = port
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen. Raises OSError where the address is not free."""
        app = web.Application(client_max_size=LARGEST)
        app.router.add_get("/{session}/v1/models", _answering(self._models))
        app.router.add_post("/{session}/v1/chat/completions", _answering(self._chat))
        app.router.add_post("/{session}/v1/completions", _answering(self._complete))
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._port = self._runner.addresses[0][1]

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

    async def _models(self, request: web.Request) -> dict[str, Any]:
        self._session(request)
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "streamrl"}]}

    async def _chat(self, request: web.Request) -> dict[str, Any]:
        session = self._session(request)
        call = msgspec.json.decode(await request.read(), type=_ChatCall)
        if call.tools:
            raise CallRefused(400, "tools: not understood; allowed: none, tell the policy of its tools in a message")
        turn = await session.chat([_message(said) for said in call.messages], **call.sampling())
        choice = {"message": {"role": "assistant", "content": turn.text}, **_choice(turn)}
        if call.logprobs:
            choice["logprobs"] = {"content": _logprobs(turn)}
        return _reply("chat.completion", turn, choice)

    async def _complete(self, request: web.Request) -> dict[str, Any]:
        session = self._session(request)
        call = msgspec.json.decode(await request.read(), type=_TextCall)
        turn = await session.complete(call.prompt, **call.sampling())
        choice = {"text": turn.text, **_choice(turn)}
        if call.logprobs:
            choice["logprobs"] = {"token_logprobs": turn.logprobs.tolist(), "tokens": _token_names(turn)}
        return _reply("text_completion", turn, choice)

    def _session(self, request: web.Request) -> Session:
        try:
            return self._sessions[request.match_info["session"]]
        except KeyError:
            raise CallRefused(404, "no such session, or it is over") from None


def _answering(method: Callable[[web.Request], Awaitable[dict[str, Any]]]) -> Any:
    """A handler that tells of an error in OpenAI's form."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return _json(200, await method(request))
        except CallRefused as refused:
            return _json(refused.status, _error(refused))
        except (msgspec.DecodeError, ValueError) as error:
            return _json(400, _error(error))

    return answer


def _json(status: int, body: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(body), content_type="application/json")


def _error(error: Exception) -> dict[str, Any]:
    return {"error": {"message": str(error)[:500], "type": "invalid_request_error", "param": None, "code": None}}


def _message(said: _Said) -> Message:
    if isinstance(said.content, str):
        return Message(role=said.role, content=said.content)
    if any(part.type != "text" for part in said.content):
        raise CallRefused(400, "messages: a part that is no text is not understood; allowed: text")
    return Message(role=said.role, content="".join(part.text for part in said.content))


def _choice(turn: Completion) -> dict[str, Any]:
    return {"index": 0, "finish_reason": turn.finish_reason, "logprobs": None}


def _logprobs(turn: Completion) -> list[dict[str, Any]]:
    pairs = zip(_token_names(turn), turn.logprobs.tolist(), strict=True)
    return [{"token": name, "logprob": logprob, "bytes": None, "top_logprobs": []} for name, logprob in pairs]


def _token_names(turn: Completion) -> list[str]:
    """Tokens by their ids, which say more than texts that cannot be joined."""
    return [f"token_id:{token}" for token in turn.output_ids.tolist()]


def _reply(kind: str, turn: Completion, choice: dict[str, Any]) -> dict[str, Any]:
    prompt, output = len(turn.prompt_ids), len(turn.output_ids)
    return {
        "id": f"cmpl-{secrets.token_hex(8)}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
        "system_fingerprint": str(turn.spans[-1].version) if turn.spans else None,
    }

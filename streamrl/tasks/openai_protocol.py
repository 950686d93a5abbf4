"""OpenAI's chat and text completions: the calls that the endpoint reads, and the replies that it writes.

A call becomes messages in the form of chat templates, an answer a message in OpenAI's form. A streamed reply has the
same content in events; it is written when the answer is whole.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from streamrl.tasks.environment import Completion, Message
from streamrl.tasks.openai_session import CallRefused

# The name of the one model.
MODEL = "policy"

END_OF_STREAM = b"data: [DONE]\n\n"


# Fields of a call that `Inference.generate` takes under the same name.
_SAMPLING = ("stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "seed")


class StreamOptions(msgspec.Struct, frozen=True):
    """What a streamed reply has besides the answer."""

    include_usage: bool = False


class Call(msgspec.Struct, frozen=True):
    """What calls of both kinds may choose. `top_k`, `min_p` and `stop_token_ids` are no part of OpenAI's protocol, and
    are called so by servers that know them."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | int | None = None

    def sampling(self) -> dict[str, Any]:
        """As `Inference.generate` takes it. Raises CallRefused for what the endpoint does not do."""
        if self.n not in (None, 1):
            raise CallRefused(400, f"n: {self.n} is not allowed; allowed: 1, a call has one answer")
        longest = self.max_completion_tokens or self.max_tokens
        chosen = {"max_new_tokens": longest} | {name: getattr(self, name) for name in _SAMPLING}
        return {name: value for name, value in chosen.items() if value is not None}

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class Part(msgspec.Struct, frozen=True):
    """A part of a message's content; only text is understood."""

    type: str
    text: str = ""


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class CalledTool(msgspec.Struct, frozen=True):
    id: str
    function: CalledFunction
    type: str = "function"


class Said(msgspec.Struct, frozen=True):
    """One message of a call."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None

    def message(self) -> Message:
        """As chat templates take it. Raises CallRefused for what is no text, or no arguments."""
        content = self.content or ""
        if not isinstance(content, str):
            if any(part.type != "text" for part in content):
                raise CallRefused(400, "messages: a part that is no text is not understood; allowed: text")
            content = "".join(part.text for part in content)
        message = Message(role=self.role, content=content)
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": each.id, "type": each.type, "function": {"name": each.function.name, "arguments": _read(each)}}
                for each in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatCall(Call, frozen=True, kw_only=True):
    """A call of /v1/chat/completions."""

    messages: Annotated[list[Said], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None

    def offered(self) -> tuple[dict[str, Any], ...]:
        """The tools that the policy may call. Raises CallRefused for a choice that would not be the policy's own."""
        if self.tools and self.tool_choice not in (None, "auto"):
            raise CallRefused(400, f"tool_choice: {self.tool_choice!r:.60} is not allowed; allowed: auto")
        return tuple(self.tools or ())


class TextCall(Call, frozen=True, kw_only=True):
    """A call of /v1/completions."""

    prompt: str


def chat_reply(call: ChatCall, turn: Completion, message: Message) -> bytes:
    """The body of the reply: JSON, or the events of a stream."""
    logprobs = {"content": _logprobs(turn)} if call.logprobs else None
    reason = "tool_calls" if "tool_calls" in message else turn.finish_reason
    wire = _on_wire(message)
    if not call.stream:
        return _encode(_reply("chat.completion", turn, wire, logprobs, reason))
    for place, each in enumerate(wire.get("tool_calls", ())):
        each["index"] = place
    begin = {"role": "assistant", "content": ""}
    deltas = [(begin, None, None), (wire, logprobs, None), ({}, None, reason)]
    return _events("chat.completion.chunk", turn, deltas, call.with_usage)


def text_reply(call: TextCall, turn: Completion) -> bytes:
    """The body of the reply: JSON, or the events of a stream."""
    logprobs = {"token_logprobs": turn.logprobs.tolist(), "tokens": _token_names(turn)} if call.logprobs else None
    if not call.stream:
        return _encode(_reply("text_completion", turn, turn.text, logprobs, turn.finish_reason))
    return _events("text_completion", turn, [(turn.text, logprobs, turn.finish_reason)], call.with_usage)


def error_reply(status: int, reason: str) -> tuple[int, dict[str, Any]]:
    """Status and body."""
    return status, {"error": {"message": reason, "type": "invalid_request_error", "param": None, "code": None}}


def _reply(kind: str, turn: Completion, content: Any, logprobs: Any, reason: str) -> dict[str, Any]:
    content_key = "text" if kind == "text_completion" else "message"
    choice = {"index": 0, content_key: content, "finish_reason": reason, "logprobs": logprobs}
    return {**_head(kind, turn), "choices": [choice], "usage": _usage(turn)}


def _events(kind: str, turn: Completion, deltas: Sequence[tuple[Any, Any, str | None]], with_usage: bool) -> bytes:
    """Server-sent events: one for each delta, the last one of usage where it is wanted."""
    head = _head(kind, turn)
    content_key = "text" if kind == "text_completion" else "delta"
    events: list[dict[str, Any]] = [
        {**head, "choices": [{"index": 0, content_key: delta, "finish_reason": reason, "logprobs": logprobs}]}
        for delta, logprobs, reason in deltas
    ]
    if with_usage:
        events.append({**head, "choices": [], "usage": _usage(turn)})
    return b"".join(b"data: " + _encode(event) + b"\n\n" for event in events) + END_OF_STREAM


def _head(kind: str, turn: Completion) -> dict[str, Any]:
    return {
        "id": f"cmpl-{secrets.token_hex(8)}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "system_fingerprint": str(turn.spans[-1].version) if turn.spans else None,
    }


def _usage(turn: Completion) -> dict[str, int]:
    prompt, output = len(turn.prompt_ids), len(turn.output_ids)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def _logprobs(turn: Completion) -> list[dict[str, Any]]:
    pairs = zip(_token_names(turn), turn.logprobs.tolist(), strict=True)
    return [{"token": name, "logprob": logprob, "bytes": None, "top_logprobs": []} for name, logprob in pairs]


def _token_names(turn: Completion) -> list[str]:
    """Tokens by their ids, which say more than texts that cannot be joined."""
    return [f"token_id:{token}" for token in turn.output_ids.tolist()]


def _on_wire(message: Message) -> dict[str, Any]:
    """A message as OpenAI writes it: arguments as JSON in a string, no content beside calls where there is no text."""
    thought = {"reasoning_content": message["reasoning_content"]} if "reasoning_content" in message else {}
    if "tool_calls" not in message:
        return {"role": message["role"], "content": message["content"], **thought}
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {"role": message["role"], "content": message["content"] or None, "tool_calls": calls, **thought}


def _read(call: CalledTool) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise CallRefused(400, f"messages: arguments of tool call {call.id:.60}: allowed: a JSON object in a string")
    return arguments


def _encode(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body)

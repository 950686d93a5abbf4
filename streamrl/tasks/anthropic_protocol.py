"""Anthropic's Messages: the calls that the endpoint reads, and the replies that it writes.

    system, [user, assistant, user]  ──▶ messages in the form of chat templates ──▶ session
    blocks: text, tool_use           ◀── the policy's answer                    ◀──

Messages of one role in a row are one turn, as Anthropic has it, and a result of a tool is a message of its own. So an
answer that comes back as it was given is the session's own, however an agent has parted it into messages and blocks.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from streamrl.tasks.environment import Completion, Message
from streamrl.tasks.openai_protocol import MODEL
from streamrl.tasks.openai_session import CallRefused

Block = dict[str, Any]

# Status and type of an error, by the status that the session, or HTTP, has for it.
ERRORS = {
    400: (400, "invalid_request_error"),
    404: (404, "not_found_error"),
    409: (409, "conflict_error"),
    410: (404, "not_found_error"),
    413: (413, "request_too_large"),
    429: (429, "rate_limit_error"),
    503: (529, "overloaded_error"),
}


class Said(msgspec.Struct, frozen=True):
    """One message of a call."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Block]:
        return [{"type": "text", "text": self.content}] if isinstance(self.content, str) else self.content


class Tool(msgspec.Struct, frozen=True):
    """A tool that the agent offers, and runs."""

    name: str
    description: str = ""
    input_schema: dict[str, Any] | None = None

    def described(self) -> dict[str, Any]:
        """In OpenAI's form, as chat templates take it. Raises CallRefused for a tool that only Anthropic knows."""
        if self.input_schema is None:
            raise CallRefused(400, f"tools: {self.name!r:.60} has no input_schema; allowed: tools with one")
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class ToolChoice(msgspec.Struct, frozen=True):
    type: str


class CountCall(msgspec.Struct, frozen=True):
    """A call of /v1/messages/count_tokens."""

    messages: Annotated[list[Said], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None

    def conversation(self) -> list[Message]:
        """As chat templates take it. Raises CallRefused for a block that is not understood."""
        messages = [Message(role="system", content=_text(self.system))] if self.system else []
        for role, turns in groupby(self.messages, lambda said: said.role):
            blocks = [block for said in turns for block in said.blocks]
            messages += [_answer(blocks)] if role == "assistant" else _asked(role, blocks)
        return messages

    def offered(self) -> tuple[dict[str, Any], ...]:
        """The tools that the policy may call. Raises CallRefused for a choice that would not be the policy's own."""
        if self.tools and self.tool_choice is not None and self.tool_choice.type != "auto":
            raise CallRefused(400, f"tool_choice: {self.tool_choice.type!r:.60} is not allowed; allowed: auto")
        return tuple(tool.described() for tool in self.tools or ())


class MessagesCall(CountCall, frozen=True, kw_only=True):
    """A call of /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[Annotated[str, Meta(min_length=1)]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = False

    def conversation(self) -> list[Message]:
        """Raises CallRefused also for the beginning of an answer, which the policy would not have written."""
        if self.messages[-1].role == "assistant":
            raise CallRefused(400, "messages: the last one is of the role assistant; allowed: user, system")
        return super().conversation()

    def sampling(self) -> dict[str, Any]:
        """As `Inference.generate` takes it. Every call has to have a `max_tokens`, so it only lowers the run's."""
        chosen = {
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return {
            "most_new_tokens": self.max_tokens,
            **{name: value for name, value in chosen.items() if value is not None},
        }


def message_reply(call: MessagesCall, turn: Completion, message: Message) -> bytes:
    """The body of the reply: JSON, or the events of a stream."""
    reason, sequence = _stop(call, turn, message)
    reply = {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": _blocks(message),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": _usage(len(turn.prompt_ids), len(turn.output_ids)),
    }
    if not call.stream:
        return _encode(reply)
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _encode(event)) for event in _events(reply))


def count_reply(tokens: int) -> bytes:
    return _encode({"input_tokens": tokens})


def error_reply(status: int, reason: str) -> tuple[int, dict[str, Any]]:
    """Status and body."""
    status, kind = ERRORS[status]
    return status, {"type": "error", "error": {"type": kind, "message": reason}}


def _answer(blocks: Sequence[Block]) -> Message:
    """An earlier answer of the policy, as the session has given it."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_use", "id": str(call), "name": str(name), "input": dict(arguments)}:
                calls.append({"id": call, "type": "function", "function": {"name": name, "arguments": arguments}})
            case _:
                raise _not_understood(block, "text, tool_use")
    message = Message(role="assistant", content="".join(texts))
    if calls:
        message["tool_calls"] = calls
    return message


def _asked(role: str, blocks: Sequence[Block]) -> list[Message]:
    """What others say: each result of a tool on its own, and the texts between them."""
    messages: list[Message] = []
    for is_text, some in groupby(blocks, lambda block: block.get("type") == "text"):
        if is_text or role != "user":
            messages.append(Message(role=role, content=_text(list(some))))
        else:
            messages += map(_result, some)
    return messages or [Message(role=role, content="")]


def _result(block: Block) -> Message:
    """What a tool has given. Whether that was an error, only its text says."""
    match block:
        case {"type": "tool_result", "tool_use_id": str(call)}:
            return Message(role="tool", content=_text(block.get("content") or ""), tool_call_id=call)
    raise _not_understood(block, "text, tool_result")


def _text(content: Any) -> str:
    """A text, or the lines of blocks of text."""
    match content:
        case str():
            return content
        case list():
            return "\n".join(map(_line, content))
    raise CallRefused(400, f"messages: content {content!r:.60} is not allowed; allowed: a text, or blocks of text")


def _line(block: Any) -> str:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
    raise _not_understood(block, "text")


def _not_understood(block: Any, allowed: str) -> CallRefused:
    kind = block.get("type") if isinstance(block, dict) else block
    return CallRefused(400, f"messages: a block of type {kind!r:.60} is not understood here; allowed: {allowed}")


def _blocks(message: Message) -> list[Block]:
    """An answer as Anthropic writes it; an empty one has no block."""
    text: list[Block] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    calls: list[Block] = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": call["function"]["arguments"]}
        for call in message.get("tool_calls", ())
    ]
    return [*text, *calls]


def _stop(call: MessagesCall, turn: Completion, message: Message) -> tuple[str, str | None]:
    """Why the answer ended, and by which of the call's sequences. The turn's text has it, the message not."""
    if "tool_calls" in message:
        return "tool_use", None
    if turn.finish_reason == "length":
        return "max_tokens", None
    found = [sequence for sequence in call.stop_sequences or () if sequence in turn.text]
    return ("stop_sequence", found[0]) if found else ("end_turn", None)


def _usage(prompt: int, output: int) -> dict[str, int]:
    return {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output,
    }


def _events(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream with the content of `reply`, each block in one piece."""
    ended = {key: reply[key] for key in ("stop_reason", "stop_sequence")}
    usage = reply["usage"]
    begun = {**reply, **dict.fromkeys(ended), "content": [], "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": begun}
    for place, block in enumerate(reply["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = (
                {**block, "input": {}},
                {"type": "input_json_delta", "partial_json": json.dumps(block["input"])},
            )
        yield {"type": "content_block_start", "index": place, "content_block": empty}
        yield {"type": "content_block_delta", "index": place, "delta": delta}
        yield {"type": "content_block_stop", "index": place}
    yield {"type": "message_delta", "delta": ended, "usage": usage}
    yield {"type": "message_stop"}


def _encode(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()  # msgspec writes no half of a surrogate pair, which a policy's call may have

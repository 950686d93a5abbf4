"""One agent's session behind the endpoint, in either protocol: which calls are one conversation, and its record.

    call 1   [system, user]                          -> answer 1
    call 2   [system, user, answer 1, tool, ...]     -> answer 2     extends call 1: one sample, masked in between
    call 3   [system, another user]                  -> refused, 409: it does not extend call 2

The agent sends texts; what is trained are the ids that were sampled. A call that repeats an answer in other words than
those it was given would be another conversation, and is refused too. Where the agent offers tools, an answer is given
to it as text and calls, and must come back as it was given.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import Completion, Inference, Message, Prompt
from streamrl.tasks.parsing import Parsers
from streamrl.tasks.tool_calls import FunctionCall, split_calls


class CallRefused(Exception):
    """A call that cannot be a part of the session; `status` is for HTTP."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Session:
    """The calls of one agent, which become one sample.

    Usage:
        session = Session(inference, prompt, most_calls=8)
        turn, message = await session.chat([Message(role="user", content="caf")])
        session.completion
    """

    def __init__(
        self, inference: Inference, prompt: Prompt, *, most_calls: int, parsers: Parsers | None = None
    ) -> None:
        """`prompt` gives the sample its number alone: what is asked first is the agent's."""
        self._inference = inference
        self._index = prompt.index
        self._most_calls = most_calls
        self._parsers = parsers or Parsers()
        self._conversation: Conversation | None = None
        self._text = ""  # of a session of plain text: prompt and answers so far
        self._shown: tuple[Message, ...] = ()  # of one of messages: those so far, answers as the agent was given them
        self._tools: tuple[dict[str, Any], ...] = ()
        self._calling = asyncio.Lock()
        self.open = True

    @property
    def turns(self) -> Sequence[Completion]:
        return self._conversation.turns if self._conversation is not None else ()

    @property
    def completion(self) -> Completion | None:
        """All calls as one answer; None where there was none."""
        return self._conversation.completion if self._conversation is not None else None

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), **sampling: Any
    ) -> tuple[Completion, Message]:
        """The answer to a call of /v1/chat/completions or /v1/messages, and the message that the agent is given of it.

        tools: those that the agent offers, in OpenAI's form; the chat template tells the policy of them. An answer's
        calls are those that it writes as `<tool_call>{json}</tool_call>`, or as `task.tool_parser` reads them. Its
        reasoning need not come back. Raises CallRefused.
        """
        async with self._calling:
            self._check()
            if self._conversation is None:
                self._tools = tuple(tools)
                self._conversation = self._begun(Prompt(index=self._index, messages=tuple(messages)), self._tools)
            elif tuple(tools) != self._tools:
                raise CallRefused(409, "the tools are not the session's: those of its first call, in the same order")
            else:
                self._add(_added(self._shown, messages))
            turn = await self._generate(sampling)
            message, reasoning = shown(_before(turn, sampling.get("stop")), self._tools, self._parsers)
            self._shown = (*messages, message)
            return turn, Message(**message, reasoning_content=reasoning) if reasoning else message

    async def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> int:
        """Tokens that the policy would be given by such a call of `chat`, which is none. Raises CallRefused."""
        async with self._calling:
            self._check_open()
            if not self._shown or tuple(tools) != self._tools or not _extends(self._shown, messages):
                return len(self._begun(Prompt(index=self._index, messages=tuple(messages)), tools).ids)
            assert self._conversation is not None
            with _refused():
                added = self._conversation.added_ids(messages[len(self._shown) :])
            return len(self._conversation.ids) + len(added)

    async def complete(self, text: str, **sampling: Any) -> Completion:
        """The answer to a call of /v1/completions. Raises CallRefused."""
        async with self._calling:
            self._check()
            if self._conversation is None:
                self._conversation = self._begun(Prompt(index=self._index, text=text))
            elif self._text and text.startswith(self._text) and len(text) > len(self._text):
                self._add(text.removeprefix(self._text))
            else:
                raise CallRefused(409, "the prompt does not extend the session's text: its prompt and answers so far")
            turn = await self._generate(sampling)
            shown = _before(turn, sampling.get("stop"))
            self._text = text + shown.text
            return shown

    @contextlib.contextmanager
    def _undone(self) -> Iterator[None]:
        """Of a call whose answer is refused nothing stays: the agent may make it again in another way."""
        try:
            yield
        except CallRefused:
            if self._conversation is not None and not self._conversation.turns:
                self._conversation = None
            elif self._conversation is not None:
                self._conversation.take_back()
            raise

    def _check_open(self) -> None:
        if not self.open:
            raise CallRefused(410, "the session is over")

    def _check(self) -> None:
        self._check_open()
        if len(self.turns) == self._most_calls:
            raise CallRefused(429, f"the session has had its {self._most_calls} calls")

    def _begun(self, prompt: Prompt, tools: Sequence[dict[str, Any]] = ()) -> Conversation:
        with _refused():
            return Conversation(self._inference, prompt, tools)

    def _add(self, added: str | Sequence[Message]) -> None:
        assert self._conversation is not None
        with _refused():
            self._conversation.add(added)

    async def _generate(self, sampling: dict[str, Any]) -> Completion:
        assert self._conversation is not None
        with self._undone(), _refused():
            turn = await self._conversation.generate(**sampling)
        if self._conversation.ended:
            self.open = False
            raise CallRefused(503, "the run's servers gave no answer; the session is over")
        return turn


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """What the conversation, or its chat template, does not take is refused. Raises CallRefused."""
    try:
        yield
    except ValueError as error:
        raise CallRefused(400, str(error)) from None


def _extends(history: Sequence[Message], messages: Sequence[Message]) -> bool:
    """Whether messages begin with those so far, and go on."""
    return len(messages) > len(history) and [*messages[: len(history)]] == [*history]


def _before(turn: Completion, stop: str | Sequence[str] | None) -> Completion:
    """The answer up to the first of some stop strings, as both protocols have it; its tokens have the string."""
    strings = [stop] if isinstance(stop, str) else stop or ()

    def before(text: str) -> str:
        places = [place for each in strings if (place := text.find(each)) >= 0]
        return text[: min(places)] if places else text

    return replace(turn, text=before(turn.text), marked=None if turn.marked is None else before(turn.marked))


def shown(turn: Completion, tools: Sequence[dict[str, Any]], parsers: Parsers) -> tuple[Message, str]:
    """The answer as the agent is given it, and as it must come back: its text, and its calls; and its reasoning.

    An answer with a call that cannot be read is text, as the policy wrote it. Without `tools` it has no calls.
    """
    said = parsers.said(turn, tools)
    text, calls = said.text, [call for call in said.calls if isinstance(call, FunctionCall)]
    if parsers.tools is None and tools:
        text, calls = split_calls(text)
    elif said.calls and (len(calls) < len(said.calls) or not tools):
        text, calls = parsers.thought(turn)[1], []
    message = Message(role="assistant", content=text)
    if calls:
        message["tool_calls"] = [_called(call) for call in calls]
    return message, said.reasoning


def _called(call: FunctionCall) -> dict[str, Any]:
    """A call as the agent is given it, by a name of its own."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function}


def _added(history: Sequence[Message], messages: Sequence[Message]) -> Sequence[Message]:
    """What a call adds to the conversation. Raises CallRefused where it does not extend it."""
    if not history:
        raise CallRefused(409, "the session is one of /v1/completions")
    if [*messages[: len(history)]] != [*history]:
        raise CallRefused(409, "the messages do not extend the session's: those so far, with the answers as given")
    if len(messages) == len(history):
        raise CallRefused(409, "the call adds no message to the session's")
    return messages[len(history) :]

"""One agent's session behind the endpoint, in either protocol: which calls are one conversation, and its record.

    call 1   [system, user]                          -> answer 1
    call 2   [system, user, answer 1, tool, ...]     -> answer 2     extends call 1: one sample, masked in between
    call 3   [system, another user]                  -> answer 3     extends none: a branch of its own, another sample
    call 4   [system, user, answer 1, tool, answer 2, ...]           extends call 2 (`branching.py`)

The agent sends texts; what is trained are the ids that were sampled. A call that repeats an answer in other words than
those it was given is another branch, whose prompt is all that it says. Where the agent offers tools, an answer is given
to it as text and calls, and goes on where it comes back as it was given. Calls of several branches may be on their way
at the same time; one that is awaited is extended by none.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamrl.tasks.branching import extended
from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import Branch, Completion, Inference, Message, Prompt
from streamrl.tasks.parsing import Parsers
from streamrl.tasks.tool_calls import FunctionCall, split_calls

# What a call says: its messages, or its text.
Said = tuple[Message, ...] | str

UNANSWERED = "the run's servers gave no answer; the session is over"


class CallRefused(Exception):
    """A call that cannot be a part of the session; `status` is for HTTP."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class TooManyBranches(RuntimeError):
    """A session that asked for more branches than it may have."""


@dataclass(slots=True, eq=False)
class _Growing:
    """One branch of a session."""

    conversation: Conversation
    tools: tuple[dict[str, Any], ...] = ()
    history: Said | None = None  # all so far, answers as the agent was given them; None while it awaits one


class Session:
    """The calls of one agent, which become one sample, or one for each of its branches.

    Usage:
        session = Session(inference, prompt, most_calls=8, max_branches=4)
        turn, message = await session.chat([Message(role="user", content="caf")])
        session.completion, session.branches
    """

    def __init__(
        self,
        inference: Inference,
        prompt: Prompt,
        *,
        most_calls: int,
        max_branches: int = 1,
        parsers: Parsers | None = None,
    ) -> None:
        """`prompt` gives the samples their number alone: what is asked first is the agent's."""
        self._inference = inference
        self._index = prompt.index
        self._most_calls = most_calls
        self._max_branches = max_branches
        self._parsers = parsers or Parsers()
        self._growing: list[_Growing] = []  # in the order of their last answers, those without one behind
        self._calls = 0  # answered ones, and those on their way
        self.turns: list[Completion] = []  # the answers, in order
        self.exceeded: TooManyBranches | None = None  # there was a call that would have begun one too many
        self.lost: Exception | None = None  # why the policy could not be asked, whatever the agent makes of it
        self.open = True
        self._given_up = False  # was there a call that ended while the policy had not answered it?

    def check(self) -> None:
        """Raise what the policy raised: that is the worker's matter, and no sample's."""
        if self.lost is not None:
            raise self.lost

    @property
    def completion(self) -> Completion | None:
        """The branch with the last answer, as one answer; None where nothing was answered."""
        return self._completions[-1] if self._completions else None

    @property
    def missing(self) -> str:
        """Whose fault it is that there is no completion: "server" where a call waited for the policy, else "task"."""
        return "server" if self._given_up else "task"

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The other ones, in the order of their last answers."""
        return tuple(Branch(completion=each) for each in self._completions[:-1])

    @property
    def is_unanswered(self) -> bool:
        """Was there a call that no server answered?"""
        return any(each.conversation.ended for each in self._growing)

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), **sampling: Any
    ) -> tuple[Completion, Message]:
        """The answer to a call of /v1/chat/completions or /v1/messages, and the message that the agent is given of it.

        tools: those that the agent offers, in OpenAI's form; the chat template tells the policy of them. An answer's
        calls are those that it writes as `<tool_call>{json}</tool_call>`, or as `task.tool_parser` reads them. Its
        reasoning need not come back. Raises CallRefused.
        """
        call, offered = tuple(messages), tuple(tools)
        branch = self._asked(call, Prompt(index=self._index, messages=call), offered)
        turn = await self._answer(branch, sampling)
        message, reasoning = shown(_before(turn, sampling.get("stop")), offered, self._parsers)
        branch.history = (*call, message)
        return turn, Message(**message, reasoning_content=reasoning) if reasoning else message

    async def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> int:
        """Tokens that the policy would be given by such a call of `chat`, which is none. Raises CallRefused."""
        self._check_open()
        call, offered = tuple(messages), tuple(tools)
        branch = self._extended(call, offered)
        with _refused():
            if branch is None:
                return len(Conversation(self._inference, Prompt(index=self._index, messages=call), offered).ids)
            return len(branch.conversation.ids) + len(branch.conversation.added_ids(_beyond(branch, call)))

    async def complete(self, text: str, **sampling: Any) -> Completion:
        """The answer to a call of /v1/completions. Raises CallRefused."""
        branch = self._asked(text, Prompt(index=self._index, text=text))
        turn = await self._answer(branch, sampling)
        shown = _before(turn, sampling.get("stop"))
        branch.history = text + shown.text
        return shown

    @property
    def _completions(self) -> list[Completion]:
        return [each.conversation.completion for each in self._growing if each.conversation.turns]

    def _check_open(self) -> None:
        if not self.open:
            raise CallRefused(410, "the session is over")

    def _extended(self, call: Said, tools: tuple[dict[str, Any], ...] = ()) -> _Growing | None:
        """The branch that a call goes on with; None where it begins one."""
        histories = [
            each.history if each.tools == tools and type(each.history) is type(call) else None for each in self._growing
        ]
        place = extended(histories, call)
        return None if place is None else self._growing[place]

    def _asked(self, call: Said, prompt: Prompt, tools: tuple[dict[str, Any], ...] = ()) -> _Growing:
        """The branch that a call extends, or begins, with what it says. Raises CallRefused."""
        self._check_open()
        if self._calls == self._most_calls:
            raise CallRefused(429, f"the session has had its {self._most_calls} calls")
        branch = self._extended(call, tools)
        with _refused():
            if branch is not None:
                branch.conversation.add(_beyond(branch, call))
                return branch
            self._check_room()
            branch = _Growing(Conversation(self._inference, prompt, tools), tools)
        self._growing.append(branch)
        return branch

    def _check_room(self) -> None:
        if len(self._growing) < self._max_branches:
            return
        reason = (
            "the call does not extend a branch of the session (what was said, the answers as they were given, the same "
            f"tools), which may have no other (task.max_branches={self._max_branches})"
        )
        self.exceeded = TooManyBranches(reason)
        raise CallRefused(409, reason)

    async def _answer(self, branch: _Growing, sampling: dict[str, Any]) -> Completion:
        """The policy's next turn in a branch. Of a call that is refused, or cancelled, no token stays."""
        history, branch.history = branch.history, None
        self._calls += 1
        try:
            with _refused():
                turn = await branch.conversation.generate(**sampling)
        except BaseException as error:
            self._calls -= 1
            branch.history = history
            branch.conversation.take_back()
            if not branch.conversation.turns:
                self._growing.remove(branch)
            self._given_up = self._given_up or isinstance(error, asyncio.CancelledError)
            if isinstance(error, CallRefused) or not isinstance(error, Exception):
                raise
            self.lost, self.open = error, False
            raise CallRefused(503, UNANSWERED) from error
        self.turns.append(turn)
        self._growing.remove(branch)
        self._growing.insert(sum(bool(each.conversation.turns) for each in self._growing), branch)
        if branch.conversation.ended:
            self.open = False
            raise CallRefused(503, UNANSWERED)
        return turn


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """What the conversation, or its chat template, does not take is refused. Raises CallRefused."""
    try:
        yield
    except ValueError as error:
        raise CallRefused(400, str(error)) from None


def _beyond(branch: _Growing, call: Said) -> Said:
    """What a call that extends a branch adds to it."""
    assert branch.history is not None
    return call[len(branch.history) :]


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

"""The run's policy as an inference interface: agents see texts and ids, the conversations behind them are kept.

    call 1   [user]                            -> answer 1, a new conversation
    call 2   [user, answer 1, user]            -> answer 2, which extends it: one sample, masked in between
    call 3   [user, answer 1 in other words]   -> a conversation of its own, whose prompt is all of it

Nothing that was drawn is tokenised again. Which conversations an episode had is known by its recorder.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from pydantic import PrivateAttr

from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import Completion, Inference, Message, Prompt
from streamrl.tasks.megatron_rl.inference import (
    GenericGenerationArgs,
    InferenceRequest,
    InferenceResponse,
    LLMChatMessage,
    ReturnsLogProbs,
    ReturnsRaw,
)


class NoAnswer(ConnectionError):
    """The run's servers gave no answer."""


class Asked:
    """One conversation, and what the agent was given of it."""

    def __init__(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self.replies: list[LLMChatMessage] = []
        self.completion_ids: list[str] = []

    def texts(self) -> list[str]:
        """Each answer, as the agent may have it in a trajectory: alone, and behind the conversation before it."""
        return [text for place in range(len(self.replies)) for text in (self.replies[place].content, self.raw(place))]

    def raw(self, place: int) -> str:
        """The texts of all messages up to an answer; the chat template's marks are not in it."""
        answers, found = -1, list[str]()
        for message in self.conversation.messages:
            found.append(str(message["content"]))
            answers += message["role"] == "assistant"
            if answers == place:
                break
        return "\n".join(found)

    def token_ids(self) -> list[list[int]]:
        """For each answer the conversation before it and itself."""
        return [[*turn.prompt_ids.tolist(), *turn.output_ids.tolist()] for turn in self.conversation.turns]


class Recorder:
    """What one episode asks of the policy."""

    def __init__(self, inference: Inference, gate: asyncio.Event | None = None) -> None:
        """`gate`: no answer is drawn before it is set."""
        self.asked: list[Asked] = []
        self.reached = asyncio.Event()  # it has asked something
        self.lost: Exception | None = None  # why the policy could not be asked, whatever the agent makes of it
        self._inference = inference
        self._gate = gate

    async def answer(self, request: InferenceRequest) -> InferenceResponse:
        """Raises NoAnswer, and ValueError for messages of which the chat template makes nothing.

        Of a call that is cancelled nothing stays.
        """
        self.reached.set()
        if self._gate is not None:
            await self._gate.wait()
        messages = [Message(role=each.role, content=each.content) for each in request.prompt]
        asked = self._extended(request.prompt, messages)
        if asked is None:
            prompt = Prompt(index=0, messages=tuple(messages))
            asked = Asked(Conversation(self._inference, prompt, request.tools or ()))
            self.asked.append(asked)
        try:
            turn = await asked.conversation.generate(**_sampling(request.generation_args))
        except asyncio.CancelledError:
            asked.conversation.take_back()
            if not asked.replies:
                self.asked.remove(asked)
            raise
        except Exception as error:
            self.lost = error
            raise
        if asked.conversation.ended:
            raise NoAnswer("the run's servers gave no answer")
        return _response(asked, turn)

    def _extended(self, prompt: Sequence[LLMChatMessage], messages: Sequence[Message]) -> Asked | None:
        """The conversation that a call goes on with, told of what is new; None where it goes on with none.

        Of two with the same texts it is the one whose answer the call repeats as the object that it was given.
        """
        open_ones = [each for each in self.asked if each.replies and _goes_on(each, messages)]
        for asked in open_ones:
            if prompt[len(asked.conversation.messages) - 1] is asked.replies[-1]:
                open_ones = [asked]
        if not open_ones:
            return None
        asked = open_ones[0]
        asked.conversation.add(list(messages[len(asked.conversation.messages) :]))
        return asked


# The recorder of the episode that runs, where several have one interface.
EPISODE: ContextVar[Recorder | None] = ContextVar("episode", default=None)


class PolicyInterface(ReturnsLogProbs, ReturnsRaw):
    """The inference interface of an agent's request, whose generation arguments decide how answers are drawn."""

    _recorder: Recorder = PrivateAttr()

    def __init__(self, recorder: Recorder) -> None:
        """`recorder` of whatever is asked outside of an episode."""
        super().__init__()
        self._recorder = recorder

    async def base_generate(self, request: InferenceRequest) -> InferenceResponse:
        return await (EPISODE.get() or self._recorder).answer(request)


def _sampling(asked: GenericGenerationArgs) -> dict[str, Any]:
    """As `Inference.generate` takes it. Megatron's 0 of `top_k` and `top_p` means the whole vocabulary."""
    chosen = {
        "temperature": asked.temperature,
        "top_k": -1 if asked.top_k == 0 else asked.top_k,
        "top_p": 1.0 if asked.top_p == 0 else asked.top_p,
        "max_new_tokens": asked.max_tokens,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def _goes_on(asked: Asked, messages: Sequence[Message]) -> bool:
    """Whether the messages are those of the conversation and more; one whose answer is awaited has no end yet."""
    before: Any = asked.conversation.messages
    return len(before) < len(messages) and before[-1]["role"] == "assistant" and [*before] == [*messages[: len(before)]]


def _response(asked: Asked, turn: Completion) -> InferenceResponse:
    reply = LLMChatMessage(role="assistant", content=turn.text)
    asked.replies.append(reply)
    asked.completion_ids.append(secrets.token_hex(8))
    return InferenceResponse(
        response=reply,
        raw_text=asked.raw(len(asked.replies) - 1),
        token_ids=[*turn.prompt_ids.tolist(), *turn.output_ids.tolist()],
        prompt_length=len(turn.prompt_ids),
        logprobs=turn.logprobs.tolist(),
        finish_reason=turn.finish_reason,
        completion_id=asked.completion_ids[-1],
    )

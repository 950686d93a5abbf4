"""What an agent asks of a policy, and what it is told: the inference interface of Megatron-RL, in its shapes.

prepare_request(prompt, generation_args) ─▶ InferenceRequest ── agenerate ──▶ InferenceResponse
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Registered = TypeVar("Registered", bound="TypeLookupable")

_REGISTERED: dict[type, dict[str, type[TypeLookupable]]] = defaultdict(dict)


class TypeLookupable(BaseModel, extra="allow"):
    """A model that travels as its base class, with the name of its own class in `type_name`."""

    type_name: str = Field("Null", frozen=True)

    def unwrap(self) -> Any:
        """What was wrapped, as an instance of its own class. Raises ValueError for a class that was not registered."""
        known = _REGISTERED[type(self)]
        if self.type_name not in known:
            raise ValueError(f"type_name: {self.type_name} is not allowed; allowed: one of {', '.join(known)}")
        return known[self.type_name](**self.model_dump())

    @classmethod
    def register_subclass(cls, register_type: type[Registered]) -> type[Registered]:
        """A decorator: `unwrap` of a `cls` finds the class by the default of its `type_name`."""
        _REGISTERED[cls][register_type.model_fields["type_name"].default] = register_type
        return register_type


class GenericGenerationArgs(BaseModel):
    """How an answer is drawn; None: as the run is configured."""

    model_config = ConfigDict(frozen=True)

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None

    def add(self, generation_args: GenericGenerationArgs) -> GenericGenerationArgs:
        """These, with what the other one sets in their place."""
        return self.model_copy(update=generation_args.model_dump(exclude_unset=True))


class Request(BaseModel):
    """What every request has."""

    generation_args: GenericGenerationArgs = GenericGenerationArgs()


class LLMChatMessage(BaseModel):
    """One message of a conversation."""

    role: str
    content: str


class InferenceRequest(Request):
    """A conversation that is to be answered."""

    prompt: list[LLMChatMessage]
    tools: list[dict[str, Any]] | None = None


class InferenceResponse(BaseModel):
    """An answer."""

    response: LLMChatMessage
    raw_text: str | None = None  # of the conversation and the answer
    token_ids: list[int] | None = None  # of the conversation and the answer
    prompt_length: int | None = None  # tokens of the conversation
    logprobs: list[float] | None = None  # of the answer's tokens
    finish_reason: str  # stop | length
    completion_id: str | None = None


class InferenceInterface(BaseModel):
    """Whatever answers requests."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def prepare_request(
        self, prompt: str | list[LLMChatMessage], generation_args: GenericGenerationArgs
    ) -> InferenceRequest:
        """A text becomes one message of the user's."""
        messages = [LLMChatMessage(role="user", content=prompt)] if isinstance(prompt, str) else prompt
        return InferenceRequest(prompt=messages, generation_args=generation_args)

    async def base_generate(self, request: InferenceRequest) -> InferenceResponse:
        """Answer one request: what an interface of its own gives."""
        raise NotImplementedError(f"{type(self).__name__} has no base_generate")

    async def agenerate(self, request: InferenceRequest) -> InferenceResponse:
        return await self.base_generate(request)

    def generate(self, request: InferenceRequest) -> InferenceResponse:
        """As `agenerate`, where no event loop runs. Raises RuntimeError where one does."""
        return asyncio.run(self.agenerate(request))


class ReturnsRaw(InferenceInterface):
    """Its answers have `raw_text`."""


class ReturnsTokens(InferenceInterface):
    """Its answers have `token_ids` and `prompt_length`."""


class ReturnsLogProbs(ReturnsTokens):
    """Its answers have `logprobs`."""


class Server(TypeLookupable):
    """Something with an address, that is launched and killed."""

    @classmethod
    async def launch(cls, *args: Any, **kwargs: Any) -> Self:
        raise NotImplementedError(f"{cls.__name__} cannot be launched")

    async def suspend(self) -> None:
        """Let go of devices."""

    async def resume(self) -> None:
        """Take them again."""

    async def kill(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot be killed")


class InferenceServer(Server, InferenceInterface):
    """An inference interface with an address: what a request to another machine has in it."""

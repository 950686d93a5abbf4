"""What every policy with weights of its own does alike: read a request, refuse what it cannot do, type the answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from streamrl.engine.answers import Answer, AnswerMeta, FinishReason, WeightVersionSpan
from streamrl.engine.client import EngineError, SentImage
from streamrl.types import PolicyVersion

VERSION = PolicyVersion(0)  # of every token: its weights never change


class EngineRefused(EngineError):
    """An engine that cannot do what it is asked, now or ever. Not a failed answer: the caller ends."""

    def __init__(self, engine: str, reason: str) -> None:
        super().__init__(engine, "", None, reason)

    def __str__(self) -> str:
        return f"{self.address}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """How the tokens of a request are drawn.

    Example: `Parameters.of({"temperature": 1.0, "max_new_tokens": 16, "stop_token_ids": [0]}, "transformers")`.
    """

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: all
    top_k: int = -1  # -1: all
    min_p: float = 0.0  # 0: all
    max_new_tokens: int = 16
    stop: tuple[str, ...] = ()  # an answer ends with the token that completes one of them
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    @classmethod
    def of(cls, sampling: Mapping[str, Any], engine: str) -> Parameters:
        """From SGLang's names. Raises EngineRefused for another one, or a value out of its range."""
        given = {_NAMES.get(name, name): value for name, value in sampling.items() if value is not None}
        if unknown := given.keys() - cls.__dataclass_fields__.keys():
            known = ", ".join(cls.__dataclass_fields__)
            name = min(unknown)
            raise EngineRefused(engine, f"sampling {name}={given[name]!r} is not possible; allowed: {known}")
        stop = given.get("stop", ())
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
        asked = cls(**given)
        for name, (holds, allowed) in _RANGES.items():
            if not holds(value := getattr(asked, name)):
                raise EngineRefused(engine, f"sampling {name}={value!r} is not possible; allowed: {allowed}")
        return asked

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


_NAMES = {"sampling_seed": "seed"}  # SGLang's name: the one here

_RANGES = {
    "temperature": (lambda value: value >= 0, "0 or more"),
    "top_p": (lambda value: 0 < value <= 1, "above 0, up to 1"),
    "top_k": (lambda value: value == -1 or value >= 1, "-1, or 1 or more"),
    "min_p": (lambda value: 0 <= value <= 1, "0 to 1"),
    "max_new_tokens": (lambda value: value >= 1, "1 or more"),
    "stop": (all, "strings that are not empty"),
}


class Ends(Protocol):
    """Where an answer may end: the caller cuts it there, so that the rest need not be drawn."""

    def found(self, ids: Sequence[int], start: int) -> bool:
        """Is there an end at or behind token `start`?"""
        ...


def check_request(
    engine: str, *, experts: bool, sets: bool, images: Sequence[SentImage], at_least: PolicyVersion | None
) -> None:
    """Raise EngineRefused for what a request has beyond token ids, or asks for beyond log-probs.

    `experts`: those of each token. `sets`: the tokens from which each was drawn.
    """
    if experts:
        raise EngineRefused(engine, "it does not tell the experts of a token; allowed: learner.router_replay=false")
    if sets:
        raise EngineRefused(engine, "it does not tell from which tokens one was drawn, as training needs it")
    if images:
        raise EngineRefused(engine, "it is given token ids, and no images; allowed: tasks of text")
    if at_least is not None and at_least.step > VERSION.step:
        raise EngineRefused(engine, f"its weights are those of no version, and {at_least} is asked for")


def typed_answer(
    engine: str,
    name: str,
    ids: Sequence[int],
    logprobs: Sequence[float],
    finish: Literal["stop", "length", "abort"],
) -> Answer:
    """An answer of T `ids` with the log-prob of each. Raises EngineRefused where they do not go together."""
    if len(logprobs) != len(ids):
        raise EngineRefused(engine, f"{len(logprobs)} log-probs for {len(ids)} token ids; allowed: one for each")
    if not all(math.isfinite(each) for each in logprobs):
        raise EngineRefused(engine, "a log-prob that is no finite number; allowed: finite ones")
    return Answer(
        output_ids=list(ids),
        meta_info=AnswerMeta(
            id=name,
            finish_reason=FinishReason(finish),
            weight_versions=(WeightVersionSpan(str(VERSION), 0, len(ids)),),
            output_token_logprobs=[(value, token, None) for value, token in zip(logprobs, ids, strict=True)],
        ),
    )

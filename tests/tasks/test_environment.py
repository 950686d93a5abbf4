"""The environment interface: groups of scored rollouts, whatever a scorer does."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from streamrl.tasks.environment import FAILED, Completion, Environment, Message, Prompt, Score
from streamrl.types import PolicyVersion, VersionSpan


def completion(text: str, finish_reason: str = "stop") -> Completion:
    """An answer as a server would give it; the token ids are of no matter to a scorer."""
    length = len(text.split()) + (finish_reason == "stop")
    return Completion(
        text=text,
        prompt_ids=np.zeros(1, np.int32),
        output_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        spans=(VersionSpan(PolicyVersion(0), 0, length),),
        finish_reason=finish_reason,
    )


class Answers:
    """A policy that gives prepared answers."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.asked: list[str | list[Message]] = []

    async def generate(self, prompt: str | list[Message], n: int, **sampling: Any) -> list[Completion]:
        self.asked.append(prompt)
        return [completion(self.texts[index % len(self.texts)]) for index in range(n)]


class Moody(Environment):
    """Raises for some answers, gives no number for others."""

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, text="?")

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        if completion.text == "raise":
            raise KeyError("no such thing")
        return Score(reward=math.nan if completion.text == "nan" else 1.0)


def test_a_scorer_that_raises_costs_its_own_sample_and_nothing_else():
    policy = Answers("fine", "raise", "nan", "fine")
    environment = Moody()
    rollouts = asyncio.run(environment.rollout_group(policy, environment.prompt(3), n=4))
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 0.0, 1.0]
    assert [rollout.parts for rollout in rollouts] == [{}, {FAILED: 1.0}, {FAILED: 1.0}, {}]
    assert "KeyError" in (rollouts[1].failure or "")
    assert "finite" in (rollouts[2].failure or "")
    assert rollouts[0].failure is None
    assert policy.asked == ["?"]


def test_an_error_of_the_policy_is_not_swallowed():
    class Broken:
        async def generate(self, prompt: str | list[Message], n: int, **sampling: Any) -> list[Completion]:
            raise ConnectionError("server lost")

    environment = Moody()
    with pytest.raises(ConnectionError, match="server lost"):
        asyncio.run(environment.rollout_group(Broken(), environment.prompt(0), n=2))


def test_a_prompt_is_either_text_or_messages():
    with pytest.raises(ValueError, match="either text or messages"):
        Prompt(index=0)
    with pytest.raises(ValueError, match="either text or messages"):
        Prompt(index=0, text="a", messages=(Message(role="user", content="a"),))
    assert Prompt(index=0, messages=(Message(role="user", content="a"),)).content == [{"role": "user", "content": "a"}]

"""Answers of a group that are judged together, or two by two."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.tasks.environment import FAILED, Completion, Prompt, Score
from streamrl.tasks.grouped import UNOPPOSED, Contrastive, Grouped

PROMPT = Prompt(index=0, text="?")


def answer(text: str | None) -> Completion:
    none = np.empty(0, np.int32)
    if text is None:
        return Completion.failed(none)
    logprobs = np.empty(0, np.float32)
    return Completion(text=text, prompt_ids=none, output_ids=none, logprobs=logprobs, spans=(), finish_reason="stop")


def judged(task, *texts: str | None):
    return asyncio.run(task.score_all(PROMPT, [answer(text) for text in texts]))


class Shortest(Grouped):
    """One point for the shortest answer of a group."""

    def prompt(self, index: int) -> Prompt:
        return PROMPT

    async def score_group(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        shortest = min(len(completion.text) for completion in completions)
        return [Score(reward=float(len(completion.text) == shortest)) for completion in completions]


class Shorter(Contrastive):
    """Of two answers the shorter one is the better."""

    def prompt(self, index: int) -> Prompt:
        return PROMPT

    async def preference(self, prompt: Prompt, first: Completion, second: Completion) -> float:
        return 0.5 + np.sign(len(second.text) - len(first.text)) / 2


def test_a_judge_of_groups_sees_all_answers_that_were_given():
    rollouts = judged(Shortest(), "aa", "a", "aaa", None)
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 0.0, 0.0]
    assert rollouts[3].completion.finish_reason == "abort"


def test_a_judge_of_groups_that_fails_costs_the_group_its_reward():
    class Forgetful(Shortest):
        async def score_group(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
            return [Score(reward=1.0)]

    assert [rollout.parts for rollout in judged(Forgetful(), "a", "b")] == [{FAILED: 1.0}] * 2


def test_each_answer_is_held_against_every_other_one_that_was_given():
    rollouts = judged(Shorter(), "aa", "a", None, "aaa", "aa")
    assert [rollout.reward for rollout in rollouts] == [pytest.approx(each) for each in (0.5, 1.0, 0.0, 0.0, 0.5)]
    assert [rollout.reward for rollout in judged(Shorter(), "a")] == [UNOPPOSED]
    assert [rollout.reward for rollout in judged(Shorter(), None)] == [0.0]


@given(st.lists(st.text(alphabet="a", max_size=9), min_size=2, max_size=9))
def test_what_one_answer_wins_another_loses_and_a_better_one_never_has_less(texts):
    rewards = [rollout.reward for rollout in judged(Shorter(), *texts)]
    assert np.mean(rewards) == pytest.approx(0.5)
    for text, reward in zip(texts, rewards, strict=True):
        assert all(reward >= other for longer, other in zip(texts, rewards, strict=True) if len(longer) > len(text))


def test_a_preference_that_is_none_costs_the_group_its_reward():
    class Odd(Shorter):
        async def preference(self, prompt: Prompt, first: Completion, second: Completion) -> float:
            return 1.5

    rollouts = judged(Odd(), "a", "b")
    assert [rollout.parts for rollout in rollouts] == [{FAILED: 1.0}] * 2
    assert "preference 1.5 is not allowed" in rollouts[0].failure

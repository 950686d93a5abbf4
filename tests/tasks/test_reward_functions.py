"""Reward functions of a user's: which arguments each form is given, and how what they say becomes one score."""

from __future__ import annotations

import asyncio
import functools

import pytest

from streamrl.tasks.environment import EXACT
from streamrl.tasks.functions.rewards import Answer, NoReward, RewardFunction, combined

ANSWERS = [Answer("4", "4", (9, 1), "stop"), Answer("", "", (), "length")]
ROW = {"prompt": "2+2=", "answer": "4", "level": 2}


def said(function, answers=ANSWERS, prompt="2+2=", row=ROW):
    return asyncio.run(RewardFunction(function)(prompt, answers, row))


def test_a_function_of_a_batch_gets_one_entry_an_answer_of_all_that_it_names():
    def reward(prompts, completions, completion_ids, level, **columns):
        assert prompts == ["2+2=", "2+2="]
        assert completion_ids == [[9, 1], []]
        assert level == [2, 2]
        assert columns["answer"] == ["4", "4"]
        assert columns["finish_reasons"] == ["stop", "length"]
        return [float(text == "4") for text in completions]

    assert said(reward) == [{"reward": 1.0}, {"reward": 0.0}]


def test_a_function_is_of_a_batch_where_it_names_what_only_a_batch_has_or_takes_all_and_nothing_of_one_answer():
    def lengths(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    def asked(prompts, completion_ids):
        return [float(len(prompt)) for prompt in prompts]

    def played(environments):
        return [0.5 for _ in environments]

    assert said(lengths) == [{"reward": 2.0}, {"reward": 0.0}]
    assert said(asked) == [{"reward": 4.0}, {"reward": 4.0}]
    assert said(played) == [{"reward": 0.5}, {"reward": 0.5}]
    RewardFunction(lambda prompts, completion_ids, **_: []).check(["prompt", "answer"])
    assert not RewardFunction(lambda completion_ids: 1.0).of_batch
    assert not RewardFunction(lambda text, completion_ids, **_: 1.0).of_batch


def test_a_function_of_one_answer_gets_what_it_names():
    def reward(completion, answer, finish_reason):
        return {"reward": float(completion == answer), "cut": float(finish_reason == "length")}

    assert said(reward) == [{"reward": 1.0, "cut": 0.0}, {"reward": 0.0, "cut": 1.0}]
    assert said(lambda text: 1.0 * len(text)) == [{"reward": 1.0}, {"reward": 0.0}]


def test_functions_may_be_async_partial_or_objects():
    async def batch(completions, **_):
        await asyncio.sleep(0)
        return [1.0 for _ in completions]

    class Scorer:
        async def __call__(self, text):
            return 2.0

    assert said(batch) == [{"reward": 1.0}] * 2
    assert said(Scorer()) == [{"reward": 2.0}] * 2
    assert said(functools.partial(lambda text, factor: factor * len(text), factor=3)) == [
        {"reward": 3.0},
        {"reward": 0.0},
    ]
    assert RewardFunction(functools.partial(batch)).name == "batch"
    assert RewardFunction(Scorer()).name == "Scorer"


def test_an_answer_on_which_a_function_raises_costs_no_other():
    def reward(text):
        return 1.0 / len(text)

    first, second = said(reward)
    assert first == {"reward": 1.0}
    assert isinstance(second, ZeroDivisionError)


def test_a_batch_that_raises_or_has_another_length_has_failed_as_a_whole():
    def raising(completions, **_):
        raise KeyError("answer")

    assert [type(each) for each in said(raising)] == [KeyError, KeyError]
    (first, _) = said(lambda completions: [1.0])
    assert "gave 1 rewards for 2 answers" in str(first)


def test_an_argument_that_is_no_column_is_refused_with_the_nearest_one():
    reward = RewardFunction(lambda completions, anwser: [])
    with pytest.raises(ValueError, match=r"'anwser', which is no column; allowed: .*; nearest known argument: answer"):
        reward.check(["prompt", "answer"])
    RewardFunction(lambda completions, anwser=None: []).check(["prompt", "answer"])
    RewardFunction(lambda completions, answer: []).check(["prompt", "answer"])


def test_the_score_is_the_weighted_sum_of_those_that_have_a_say_and_each_is_a_part():
    def exact(text):
        return None

    def short(text):
        return None

    functions = [RewardFunction(exact), RewardFunction(short, 0.5)]
    both = combined(functions, [{"reward": 1.0, "digits": 3.0}, {"reward": -1.0}], right=1.0)
    assert (both.reward, both.parts) == (0.5, {EXACT: 0.0, "exact": 1.0, "digits": 3.0, "short": -1.0})
    one = combined(functions, [None, {"reward": 4.0}], right=1.0)
    assert (one.reward, one.parts) == (2.0, {EXACT: 1.0, "short": 4.0})
    with pytest.raises(NoReward):
        combined(functions, [None, None], right=1.0)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(ValueError, match=r"reward_weights: .* allowed: finite numbers"):
        RewardFunction(lambda text: 1.0, weight)

"""The wrapped puzzles: only scorers that behave, exact scores, prompts by index."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks.built_in.reasoning_gym import BEHAVED, extract
from streamrl.tasks.environment import EXACT, Completion, Prompt
from streamrl.tasks.registry import build_task

ONE_DIGIT = {
    "dataset": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "suffix": " Answer with just the number.",
    "extract": "last_number",
}
# No numbers: a number may be right.
JUNK = (
    "",
    "banana",
    "-",
    "<answer>3</answer>",
    "[",
    "[1,2",
    "(",
    "1/0",
    "9**9",
    "\\frac{1}{2}",
    "x" * 3000,
    "\x00",
    "{}",
)


def task(split="train", seed=1, **args):
    return build_task(TaskConfig(name="reasoning_gym", args=args), seed, split)


def reward(environment, prompt: Prompt, text: str) -> float:
    empty = np.zeros(0, np.int32)
    logprobs = np.zeros(0, np.float32)
    given = Completion(text=text, prompt_ids=empty, output_ids=empty, logprobs=logprobs, spans=(), finish_reason="stop")
    score = asyncio.run(environment.score(prompt, given))
    assert score.parts == {EXACT: score.reward}
    return score.reward


@pytest.mark.parametrize("dataset", BEHAVED)
def test_an_allowed_data_set_gives_the_right_answer_1_and_junk_0_and_never_raises(dataset):
    from reasoning_gym.factory import create_dataset  # here, because it takes seconds

    environment = task(dataset=dataset)
    for index in (0, 1, 123_456_789):
        prompt = environment.prompt(index)
        assert reward(environment, prompt, prompt.answer) == 1.0
        assert [junk for junk in JUNK if junk != prompt.answer and reward(environment, prompt, junk) != 0.0] == []
    first = create_dataset(dataset, seed=7, size=1)
    larger = create_dataset(dataset, seed=7, size=60)
    assert [first[place]["question"] for place in range(3)] == [larger[place]["question"] for place in range(3)]


def test_one_digit_sums_are_asked_by_chat_and_judged_by_their_last_number():
    environment = task(**ONE_DIGIT)
    prompt = environment.prompt(0)
    assert prompt.messages[0]["content"].endswith("= Answer with just the number.")
    assert reward(environment, prompt, f"Sure: it is {prompt.answer}.") == 1.0
    assert reward(environment, prompt, f"{prompt.answer} or rather 99") == 0.0
    assert reward(environment, prompt, "no number") == 0.0


def test_partial_credit_of_a_scorer_is_no_reward():
    environment = task(dataset="letter_counting")
    prompt = environment.prompt(0)
    partial = f"{prompt.answer} indeed"
    assert 0 < environment._dataset.score_answer(partial, prompt.metadata["entry"]) < 1
    assert reward(environment, prompt, partial) == 0.0


def test_probe_and_train_share_no_question_though_there_are_only_200():
    train, probe = task(**ONE_DIGIT), task("probe", **ONE_DIGIT)
    probed = {probe.prompt(index).messages[0]["content"] for index in range(200)}
    trained = {train.prompt(index).messages[0]["content"] for index in range(3000)}
    assert not trained & probed
    assert len(trained) > 150
    assert len(probed) >= 3


def test_the_prompt_of_an_index_is_the_same_again_and_seeds_differ():
    once, again, other = task(**ONE_DIGIT), task(**ONE_DIGIT), task(seed=2, **ONE_DIGIT)
    indices = [0, 5, 3, 10**6]
    assert [once.prompt(index) for index in indices] == [again.prompt(index) for index in indices]
    shifted = [once.prompt(index).answer for index in range(1, 60)] == [
        other.prompt(index).answer for index in range(59)
    ]
    assert not shifted


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"dataset": "countdown"}, r"task\.args\.dataset: 'countdown' is not allowed; allowed: one of ab, "),
        ({"dataset": "chain_sums"}, r"task\.args\.dataset: .*nearest known value: chain_sum"),
        (
            {"params": {"min_term": 2}},
            r"task\.args\.params\.min_term: unknown key .*nearest known key: task\.args\.params\.min_terms",
        ),
        ({"params": {"size": 2}}, r"task\.args\.params\.size: unknown key"),
        ({"params": {"min_terms": 9}}, r"task\.args\.params: .*max_terms must be >= min_terms"),
        ({"extract": "first"}, r"task\.args\.extract: 'first' is not allowed .*one of whole, last_number"),
        ({"sufix": ""}, r"task\.args\.sufix: unknown key .*nearest known key: task\.args\.suffix"),
    ],
)
def test_bad_arguments_give_one_line_that_names_the_key(args, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        task(**args)


@pytest.mark.parametrize(
    ("text", "number"),
    [("4 + 3 = 7.", "7"), ("1,234", "1234"), ("-5", "-5"), ("2.50 €", "2.50"), ("none", ""), ("", "")],
)
def test_the_last_number_is_found(text, number):
    assert extract(text, "last_number") == number

"""The tasks copy and successor."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks.environment import EXACT, Completion, Score
from streamrl.tasks.registry import build_task


def answer(text: str, finish_reason: str = "stop") -> Completion:
    empty = np.zeros(0, np.int32)
    return Completion(
        text=text,
        prompt_ids=empty,
        output_ids=empty,
        logprobs=np.zeros(0, np.float32),
        spans=(),
        finish_reason=finish_reason,
    )


def task(name="copy", split="train", seed=1, **args):
    return build_task(TaskConfig(name=name, args=args), seed, split)


def scored(environment, prompt, text, finish_reason="stop") -> Score:
    return asyncio.run(environment.score(prompt, answer(text, finish_reason)))


def test_copy_asks_for_the_string_and_successor_for_the_next_symbols():
    prompt = task("copy").prompt(5)
    assert prompt.text == f"{prompt.answer}="
    successor = task("successor").prompt(5)
    given = successor.text[:-1]
    following = dict(zip("abcdefgh", "bcdefgha", strict=True))
    assert successor.answer == "".join(following[symbol] for symbol in given)


@pytest.mark.parametrize(
    ("text", "finish_reason", "reward", "exact"),
    [
        ("{0}{1}{2}", "stop", 1.0, 1.0),
        ("{0}{1}{2}", "length", 3 / 4, 0.0),  # all symbols, no end
        ("{0}{1}{2}{0}", "stop", 3 / 5, 0.0),  # ends too late
        ("{0}{1}{2}{0}{1}", "length", 3 / 6, 0.0),  # never ends
        ("{0}{1}", "stop", 2 / 4, 0.0),  # ends early
        ("={0}{1}{2}", "length", 0.0, 0.0),  # shifted by one
        ("", "stop", 0.0, 0.0),
        ("banana \x00 [ 1/0", "stop", 0.0, 0.0),
    ],
)
def test_the_reward_is_the_share_of_right_tokens_the_end_included(text, finish_reason, reward, exact):
    environment = task("copy", alphabet="xyz")
    prompt = next(p for p in map(environment.prompt, range(99)) if len(set(p.answer)) == 3)
    score = scored(environment, prompt, text.format(*prompt.answer), finish_reason)
    assert score == Score(reward=reward, parts={EXACT: exact})


@pytest.mark.parametrize("name", ["copy", "successor"])
def test_probe_and_train_share_no_prompt_and_together_are_all_strings(name):
    train, probe = task(name), task(name, "probe")
    trained = {train.prompt(index).text for index in range(train.size)}
    probed = {probe.prompt(index).text for index in range(probe.size)}
    assert not trained & probed
    assert len(trained) + len(probed) == 8**3
    assert len(trained) == train.size
    assert len(probed) == probe.size == 26


def test_every_epoch_has_all_prompts_in_another_order_and_the_seed_leaves_the_probes():
    train = task()
    first = [train.prompt(index).text for index in range(train.size)]
    second = [train.prompt(index).text for index in range(train.size, 2 * train.size)]
    assert first != second
    assert sorted(first) == sorted(second)
    probes = [task(split="probe", seed=seed) for seed in (1, 2)]
    shown = [{probe.prompt(index).text for index in range(probe.size)} for probe in probes]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            {"lenght": 3},
            r"task\.args\.lenght: unknown key \(given 3\); allowed: .*; nearest known key: task\.args\.length",
        ),
        ({"length": 0}, r"task\.args\.length: 0 is not allowed .*allowed: whole number >= 1 and <= 64"),
        ({"length": "three"}, r"task\.args\.length: 'three' is not allowed .*whole number"),
        ({"alphabet": "aab"}, r"task\.args\.alphabet: 'aab' is not allowed; allowed: different symbols"),
        ({"held_out": 1.5}, r"task\.args\.held_out: 1\.5 is not allowed .*> 0 and < 1"),
    ],
)
def test_bad_arguments_give_one_line_that_names_the_key(args, line):
    with pytest.raises(ValueError, match=f"^{line}") as refused:
        task(**args)
    assert "\n" not in str(refused.value)

"""The reward as a weighted sum: which parts it has, and what becomes of an answer without one of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError
from streamrl.tasks.environment import Prompt, Rollout
from streamrl.tasks.registry import build_task
from streamrl.tasks.weighted import Weighted, check_turns

REWARDS = [{"name": "of_task", "weight": 2.0}, {"name": "reward_model", "weight": 0.5, "label": "liked"}]


class Lengths:
    """A judge of lengths, which has no score for an empty answer."""

    def __init__(self) -> None:
        self.judged: list[str] = []

    async def scores(self, prompt, answers):
        self.judged += answers
        return [float(len(answer)) if answer else "empty" for answer in answers]


def config_of(**task) -> Config:
    given = {"rewards": REWARDS, "reasoning_parser": "think", **task}
    return Config.model_validate({"task": given, "reward_model": {"path": "reward"}})


def test_a_reward_is_the_weighted_sum_of_its_parts_and_what_has_none_is_masked(completion):
    judge = Lengths()
    aborted = replace(completion("gone"), finish_reason="abort")
    rollouts = [
        Rollout(completion=completion("<think>long</think>abc"), reward=1.0, parts={"exact": 1.0}),
        Rollout(completion=completion("<think>cut"), reward=1.0),
        Rollout(completion=aborted, reward=0.0),
        Rollout(completion=completion("x"), reward=0.0, failure="away", masked=True),
    ]
    found = asyncio.run(Weighted.of(config_of(), judge).judged(Prompt(index=3, text="-"), rollouts))
    assert found[0].reward == 2.0 * 1.0 + 0.5 * 3
    assert found[0].parts == {"exact": 1.0, "rewards.of_task": 1.0, "rewards.liked": 3.0}
    assert (found[1].masked, found[1].failure) == (True, "liked: empty")
    assert found[2:] == rollouts[2:]
    assert judge.judged == ["abc", ""]
    assert asyncio.run(Weighted().judged(Prompt(index=3, text="-"), rollouts)) == rollouts


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["task.rewards=[{name: reward_model}]"], "task.rewards: reward_model needs a model"),
        (["reward_model.path=x"], "reward_model.path: x would judge nothing"),
        (["task.rewards=[{name: of_task}, {name: of_task}]"], "task.rewards: 'of_task' is there twice"),
        (["task.rewards=[{name: ofttask}]"], "nearest known value: of_task"),
        (["reward_model.patience=1"], "reward_model.patience: 1 s end before one try"),
        (["task.tool_parser=hermess"], "nearest known value: hermes"),
        (["task.chat_template_kwargs={tools: []}"], "task.chat_template_kwargs: 'tools' is what every template"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(overrides, line):
    with pytest.raises(ConfigError, match=line) as refused:
        config_file.load(None, overrides)
    assert "\n" not in str(refused.value)


def test_a_reward_model_for_several_turns_is_refused():
    config = config_of(name="lookup")
    tasks = {"lookup": build_task(config.task, 1, "train")}
    with pytest.raises(ValueError, match=r"task.rewards: .* lookup has several turns"):
        check_turns(config, tasks)

"""Tasks around another one ask the prompts of that one, and as many; and who judges for them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from streamrl.choices import TASKS
from streamrl.config import Config
from streamrl.config.task import ScoringConfig, TaskConfig, TaskShare
from streamrl.tasks.environment import Environment
from streamrl.tasks.hosted import check_tasks
from streamrl.tasks.megatron_rl.environment_agent import EnvironmentAgent
from streamrl.tasks.registry import build_task
from streamrl.tasks.serve import application
from streamrl.tasks.weighted import check_turns

ONE_PROCESS = TaskConfig(scoring=ScoringConfig(processes=1))
INNER: dict[str, Any] = {"name": "copy"}
AROUND: dict[str, dict[str, Any]] = {
    "agent": {"command": "true"},
    "remote": {"url": "http://127.0.0.1:1"},
    "tools": {"tools": ["calculator"]},
}
JUDGING = {name: args for name, args in AROUND.items() if name != "remote"} | {"judged": {"model": "nowhere"}}

JUDGES = """
    from streamrl.tasks.environment import Environment, Prompt, Rollout, Score
    from streamrl.tasks.functions.rewards import RewardFunction
    from streamrl.tasks.functions.task import FunctionTask
    from streamrl.tasks.grouped import Contrastive


    class Compared(Contrastive):
        def prompt(self, index):
            return Prompt(index=index, text="?")

        async def preference(self, prompt, first, second):
            return float(len(first.text) < len(second.text))


    class Ranked(Environment):
        prompt = Compared.prompt

        async def score(self, prompt, completion):
            return Score(reward=0.5)

        async def score_all(self, prompt, completions):
            ranks = sorted(completions, key=lambda each: len(each.text))
            return [Rollout(completion=each, reward=float(ranks.index(each))) for each in completions]


    class Batched(Ranked):
        judges_groups = False

        async def score_all(self, prompt, completions):
            return [Rollout(completion=each, reward=0.5) for each in completions]


    class Course(Environment):
        has_turns = True
        prompt = Compared.prompt

        async def score(self, prompt, completion):
            raise TypeError("only whole rollouts are judged")

        async def rollout_group(self, inference, prompt, n):
            raise NotImplementedError


    def shortest(completions):
        return [float(len(each) == min(map(len, completions))) for each in completions]


    def short(completion):
        return float(len(completion) < 3)


    class Batch(FunctionTask):
        rewards = (RewardFunction(shortest),)


    class Single(FunctionTask):
        rewards = (RewardFunction(short),)
"""


@pytest.fixture
def judges(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The entry of each class of JUDGES, as a configuration has it."""
    (tmp_path / "judges.py").write_text(textwrap.dedent(JUDGES))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x="}\n{"prompt": "y="}\n')
    rows = {"path": str(tmp_path / "rows.jsonl"), "cache": str(tmp_path / "cache")}
    args: dict[str, dict[str, Any]] = {"Batch": rows, "Single": rows}
    args |= {name: {} for name in ("Compared", "Ranked", "Batched", "Course")}
    return {name: {"name": f"{tmp_path}/judges.py:{name}", "args": given} for name, given in args.items()}


@pytest.mark.parametrize("split", ["train", "probe"])
@pytest.mark.parametrize("name", AROUND)
def test_a_task_around_another_one_has_as_many_prompts_as_that(name, split):
    around = build_task(TaskConfig(name=name, args={"task": INNER, **AROUND[name]}), 1, split)
    inner = build_task(TaskConfig(**INNER), 1, split)
    assert inner.size is not None
    assert around.size == inner.size


@pytest.mark.parametrize("judge", ["Compared", "Ranked", "Batch"])
@pytest.mark.parametrize("name", JUDGING)
def test_a_judge_of_groups_is_refused_where_each_answer_is_judged_alone(name, judge, judges):
    with pytest.raises(ValueError, match=r"^task\.args\.task\.name: .* judges the answers of a group") as refused:
        build_task(TaskConfig(name=name, args={"task": judges[judge], **JUDGING[name]}), 1, "train")
    allowed = "a task that judges each answer alone (a class whose score_all does says judges_groups = False)"
    assert str(refused.value).endswith(f"; allowed: {allowed}")
    assert "\n" not in str(refused.value)


def test_an_agent_has_no_question_of_a_task_that_asks_the_policy_itself():
    """Of a remote task without a local one the worker has only the index."""
    remote: dict[str, Any] = {"name": "remote", "args": AROUND["remote"]}
    with pytest.raises(
        ValueError, match=r"^task\.args\.task\.name: remote has its prompts only where it asks"
    ) as refused:
        build_task(TaskConfig(name="agent", args={"task": remote, **AROUND["agent"]}), 1, "train")
    assert "\n" not in str(refused.value)
    remote["args"] = {**AROUND["remote"], "task": INNER}
    around = build_task(TaskConfig(name="agent", args={"task": remote, **AROUND["agent"]}), 1, "train")
    assert around.prompt(3) == build_task(TaskConfig(**INNER), 1, "train").prompt(3)
    for name in ("openenv", "gymnasium", "verifiers"):
        assert TASKS.load(name).asks_itself


def test_a_judge_of_groups_is_refused_too_where_its_class_runs_elsewhere_and_served_to_megatron_rl(judges):
    share = TaskShare(name="agent", args={"task": judges["Compared"], **AROUND["agent"]})
    with pytest.raises(ValueError, match=r"^task\.args\.task\.name: .*:Compared judges the answers of a group"):
        check_tasks([share], 1, "train", ONE_PROCESS)
    with pytest.raises(ValueError, match=r"^agent_type: .*:Compared judges the answers of a group together; allowed: "):
        EnvironmentAgent(TaskShare.model_validate(judges["Compared"]), 1)


def test_a_class_that_scores_a_group_at_once_for_speed_alone_is_allowed_by_its_own_word(judges):
    for name in ("agent", "tools"):
        around = build_task(TaskConfig(name=name, args={"task": judges["Batched"], **AROUND[name]}), 1, "train")
        assert around.prompt(0).text.endswith("?")
    check_tasks([TaskShare(name="agent", args={"task": judges["Batched"], **AROUND["agent"]})], 1, "train", ONE_PROCESS)
    EnvironmentAgent(TaskShare.model_validate(judges["Batched"]), 1)


def test_a_course_of_several_turns_is_known_as_one_where_its_class_runs_elsewhere(judges):
    for name in ("tools", "judged"):
        share = TaskShare(name=name, args={"task": judges["Course"], **JUDGING[name]})
        with pytest.raises(ValueError, match=r"^task\.args\.task\.name: .*:Course has turns of its own; allowed: "):
            check_tasks([share], 1, "train", ONE_PROCESS)
    tree = {"task": {**judges["Course"], "rewards": [{"name": "reward_model"}]}, "reward_model": {"path": "reward"}}
    config = Config.model_validate(tree)

    def judge(name: str, task: Environment) -> None:
        check_turns(config, {name: task})

    with pytest.raises(ValueError, match=r"^task\.rewards: a reward model .* and Course has several turns; allowed: "):
        check_tasks(config.task.shares, 1, "train", ONE_PROCESS, judge)
    with pytest.raises(ValueError, match=r"^task\.name: Course cannot be served, as its episodes ask the policy"):
        application(config)


def test_who_gives_prompts_alone_may_judge_groups_and_a_function_of_one_answer_judges_none(judges):
    remote = build_task(TaskConfig(name="remote", args={"task": judges["Compared"], **AROUND["remote"]}), 1, "train")
    assert remote.prompt(3).text == "?"
    tools = build_task(TaskConfig(name="tools", args={"task": judges["Single"], **AROUND["tools"]}), 1, "train")
    assert not tools.judges_groups

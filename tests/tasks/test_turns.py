"""Environments of several turns and of several judges' kinds, played on a real tokenizer with given answers."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Sequence

import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks.built_in.lookup import CALLED
from streamrl.tasks.built_in.openenv import OpenEnv
from streamrl.tasks.environment import EXACT, FAILED, Completion, Message, Prompt, Score
from streamrl.tasks.http_session import HttpSession
from streamrl.tasks.registry import build_task
from streamrl.tasks.turns import TURNS, TurnByTurn

END = "<|im_end|>"
ARITHMETIC = {"dataset": "chain_sum", "params": {"min_terms": 2, "max_terms": 2}, "extract": "last_number"}


class Guessing(TurnByTurn):
    """Says "higher" until it receives 3; each turn costs a tenth."""

    max_turns = 3

    def prompt(self, index: int) -> Prompt:
        return Prompt(index=index, messages=(Message(role="user", content="a number?"),))

    async def observation(self, prompt: Prompt, turns: Sequence[Completion]) -> list[Message] | None:
        if turns[-1].text == "!":
            raise KeyError("no number")
        return None if turns[-1].text == "3" else [Message(role="user", content="higher")]

    async def turn_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> float:
        return -0.1

    async def trajectory_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
        return Score(reward=float(turns[-1].text == "3"))


def play(environment, inference, n: int = 1):
    return asyncio.run(environment.rollout_group(inference, environment.prompt(0), n))


def test_turns_go_on_until_the_environment_has_nothing_more_to_say(scripted):
    (rollout,) = play(Guessing(), scripted([["1", END], ["3", END]]))
    assert rollout.reward == pytest.approx(0.8)
    assert rollout.parts == {TURNS: 2.0}
    assert "higher" in rollout.completion.text
    assert not rollout.completion.loss_mask.all()


def test_turns_end_at_their_largest_number_with_nothing_said_behind_the_last(scripted):
    (rollout,) = play(Guessing(), scripted([["1", END]] * 4))
    assert rollout.reward == pytest.approx(-0.3)
    assert rollout.completion.loss_mask[-1]


def test_an_environment_that_raises_costs_its_own_sample_the_reward(scripted):
    rollouts = play(Guessing(), scripted([["!", END], ["3", END]]), n=2)
    assert [rollout.reward for rollout in rollouts] == [0.0, pytest.approx(0.9)]
    assert rollouts[0].parts == {FAILED: 1.0}
    assert "no number" in rollouts[0].failure


def test_a_policy_that_is_lost_ends_the_other_samples_of_its_group_first(scripted):
    inference, asked = scripted([]), []

    async def generate(*_, **__):
        asked.append(inference)
        if len(asked) == 1:
            await asyncio.sleep(1e9)
        raise ConnectionError("lost")

    async def lost():
        inference.generate = generate
        with pytest.raises(ConnectionError, match="lost"):
            await Guessing().rollout_group(inference, Guessing().prompt(0), 2)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(lost()) == set()


def test_a_policy_that_is_lost_ends_the_other_episodes_of_openenv_first(scripted):
    class Lost(OpenEnv):
        def __init__(self) -> None:
            self._http, self.played = HttpSession({}), 0

        async def _play(self, session, inference, prompt):
            self.played += 1
            if self.played > 1:
                raise ConnectionError("lost")
            await asyncio.sleep(1e9)

    async def lost():
        task = Lost()
        with pytest.raises(ConnectionError, match="lost"):
            await task.rollout_group(scripted([]), Prompt(index=0, text="x="), 2)
        await task.close()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(lost()) == set()


def lookup(**args):
    return build_task(TaskConfig(name="lookup", args={"length": 2, **args}), seed=1, split="train")


def test_the_value_of_a_lookup_comes_only_from_the_tool(scripted):
    task = lookup()
    prompt = task.prompt(0)
    key, value = prompt.metadata["key"], prompt.answer
    assert prompt.text == f"{key}="
    (right,) = play(task, scripted([[key, END], [value, END]]))
    assert right.reward == 1.0
    assert right.parts == {EXACT: 1.0, CALLED: 1.0, TURNS: 2.0}
    masked = right.completion.output_ids[~right.completion.loss_mask].tolist()
    assert scripted([]).tokenizer.text([masked]) == [f"{value}="]
    (silent,) = play(task, scripted([[value, END]]))  # a wrong call is not answered
    assert silent.parts == {EXACT: 0.0, CALLED: 0.0, TURNS: 1.0}
    assert silent.reward < 0.5


def test_each_prompt_index_keeps_another_value_so_that_none_can_be_learned_by_heart():
    task = lookup()
    assert task.prompt(3).answer == lookup().prompt(3).answer
    by_key = {}
    for index in range(4 * task.size):
        by_key.setdefault(task.prompt(index).metadata["key"], set()).add(task.prompt(index).answer)
    assert sum(len(found) > 1 for found in by_key.values()) > 0.9 * len(by_key)


def tools(task=None, **args):
    share = task or {"name": "reasoning_gym", "args": ARITHMETIC}
    return build_task(TaskConfig(name="tools", args={"task": share, **args}), seed=1, split="train")


def test_a_call_is_answered_by_the_calculator_and_the_last_turn_is_judged(scripted):
    task = tools()
    prompt = task.prompt(0)
    assert '<tool name="NAME">' in prompt.messages[0]["content"]
    expression = prompt.metadata["entry"]["question"].removeprefix("State the final answer to the following")
    expression = expression.partition(": ")[2].removesuffix(" =")
    (rollout,) = play(task, scripted([[f'<tool name="calculator">{expression}</tool>', END], [prompt.answer, END]]))
    assert rollout.parts == {EXACT: 1.0, "tool_calls": 1.0, TURNS: 2.0}
    masked = rollout.completion.output_ids[~rollout.completion.loss_mask].tolist()
    assert prompt.answer in scripted([]).tokenizer.text([masked])[0]


def test_a_call_of_no_tool_and_one_that_cannot_be_read_are_told_so(scripted):
    calls = '<tool name="web">x</tool> <tool_call>{"name": 1}</tool_call> <tool name="calculator">a</tool>'
    (rollout,) = play(tools(), scripted([[calls, END], ["0", END]]))
    for text in ("no tool 'web'; there are calculator", 'a call has a "name"', "is no arithmetic; allowed: numbers"):
        assert text in rollout.completion.text


def test_tools_around_a_task_of_several_turns_are_refused():
    with pytest.raises(ValueError, match=r"task\.args\.task\.name: lookup has turns of its own"):
        build_task(TaskConfig(name="tools", args={"task": {"name": "lookup"}}), seed=1, split="train")


def test_two_tools_of_one_name_are_refused():
    args = {"task": {"name": "copy"}, "tools": ["calculator"] * 2}
    with pytest.raises(ValueError, match=r"task\.args\.tools: 'calculator' is there twice; allowed: one tool of each"):
        build_task(TaskConfig(name="tools", args=args), seed=1, split="train")


OWN_TOOL = """
import asyncio, os, time
from streamrl.tasks.tools.base import Tool


class Populations(Tool):
    description = "the inhabitants of a city"

    async def call(self, argument):
        if argument == "Atlantis":
            time.sleep(1e9)
        if argument == "Utopia":
            await asyncio.sleep(1e9)
        return f"{ {'Rome': 28}[argument] } {os.getpid()}"
"""


def test_a_tool_of_the_users_is_named_by_its_path_and_runs_in_a_process_of_its_own(scripted, tmp_path):
    (tmp_path / "own_tools.py").write_text(OWN_TOOL)
    task = tools(tools=["calculator", f"{tmp_path}/own_tools.py:Populations"], seconds=5)
    assert "Populations: the inhabitants of a city" in task.prompt(0).messages[0]["content"]
    calls = '<tool name="Populations">Rome</tool> <tool name="Populations">Ur</tool> <tool name="calculator">6*7</tool>'

    async def played():
        try:
            (right,) = await task.rollout_group(scripted([[calls, END], ["0", END]]), task.prompt(0), 1)
            lost = '<tool name="Populations">Atlantis</tool>'
            (late,) = await task.rollout_group(scripted([[lost, END], ["0", END]]), task.prompt(0), 1)
        finally:
            await task.close()
        return right, late

    right, late = asyncio.run(played())
    place = re.search(r"28 (\d+)", right.completion.text)
    assert place
    assert int(place[1]) != os.getpid()
    assert "error: KeyError: 'Ur'" in right.completion.text
    assert "42" in right.completion.text
    assert late.masked
    assert "Populations" in late.failure


@pytest.mark.parametrize("inner", ["reasoning_gym", "jsonl"])  # the second one masks less of its own scorer's
def test_a_tool_of_the_users_that_waits_for_ever_masks_its_sample_and_its_process_goes_on(inner, scripted, tmp_path):
    (tmp_path / "own_tools.py").write_text(OWN_TOOL)
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"question": "{n}+1", "answer": "{n + 1}"}}\n' for n in range(4)))
    rows = {"path": str(tmp_path / "sums.jsonl"), "prompt": "question", "answer": "answer"}
    share = {"name": "jsonl", "args": rows} if inner == "jsonl" else None
    task = tools(share, tools=[f"{tmp_path}/own_tools.py:Populations"], seconds=1, parallel=1)

    async def called(city: str):
        call = f'<tool name="Populations">{city}</tool>'
        async with asyncio.timeout(60):
            (rollout,) = await task.rollout_group(scripted([[call, END], ["0", END]]), task.prompt(0), 1)
        return rollout

    async def played():
        try:
            return [await called(city) for city in ("Rome", "Utopia", "Rome")]
        finally:
            await task.close()

    first, late, again = asyncio.run(played())
    assert late.masked
    assert "ScorerLate: Populations took more than task.args.seconds=1 s" in late.failure
    answers = [re.search(r"28 (\d+)", each.completion.text) for each in (first, again)]
    assert None not in answers
    assert answers[0][1] == answers[1][1]


def test_a_name_that_is_no_tool_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"task\.args\.tools.*calculator, python") as refused:
        tools(tools=["abacus"])
    assert "\n" not in str(refused.value)

"""Every task and tool passes what a user's own must pass; and one that breaks a promise does not."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from aiohttp import web

from streamrl.choices import TASKS
from streamrl.config import Config
from streamrl.tasks.built_in.copy import Copy
from streamrl.tasks.environment import Prompt, Score
from streamrl.tasks.python_tool import missing_walls
from streamrl.tasks.serve import application
from streamrl.tasks.tools.calculator import Calculator
from streamrl.testing.tasks import TaskConformance
from streamrl.testing.tools import ToolConformance
from tests.harbor_tasks import write_task

TOGETHER = {"test_every_process_can_load_it_without_torch": None}  # in tests/test_own_choices.py, all at once
DATA = Path(__file__).parent / "data"
AGENT = """
import json, os, sys, urllib.request
question = json.load(sys.stdin)
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": question["text"]}]}).encode()
with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, timeout=60) as reply:
    print(json.load(reply)["choices"][0]["message"]["content"], end="")
"""
HUB: dict[str, dict[str, Any]] = {
    path.stem: {"path": str(path)} for path in DATA.glob("*.jsonl") if path.stem in TASKS.names
}
for _name in [name for name in HUB if "held_out_count" in TASKS.load(name).defaults]:
    HUB[_name]["held_out_count"] = 1
ARGS: dict[str, dict[str, Any]] = {
    **HUB,
    "jsonl": {"path": str(DATA / "big_math.jsonl"), "prompt": "problem"},
    "megatron_rl": {"hf_dataset_name": str(DATA / "dapo_math.jsonl"), "train_count": 2, "held_out_count": 1},
    "reasoning_gym": {"dataset": "chain_sum", "extract": "last_number"},
    "tools": {"task": {"name": "copy"}},
    "agent": {"task": {"name": "copy"}, "command": shlex.join([sys.executable, "-S", "-c", AGENT]), "timeout": 100},
}
EXPRESSIONS = {"42": "(25 - 4) * 2", "24": "3 * 8", "7": "4 + 3 * (2 - 1)"}
FORMS = {"boxed": r"\boxed{%s}", "line": "Answer: %s", "tagged": "<answer>%s</answer>"}


def right(conformance: TaskConformance, prompt: Prompt) -> list[str]:
    """The right answer in the form that the data set asks for."""
    form = FORMS.get(conformance.declaration.defaults.get("form"), "%s")
    return [form % (EXPRESSIONS[str(prompt.answer)] if conformance.name == "countdown" else prompt.answer)]


def written(conformance: TaskConformance, prompt: Prompt) -> list[str]:
    """What the instruction asks to be written."""
    return [str((prompt.messages or ())[-1]["content"])]


def tagged(conformance: TaskConformance, prompt: Prompt) -> list[str]:
    """The right answer in tags."""
    return [FORMS["tagged"] % prompt.answer]


def lookup(conformance: TaskConformance, prompt: Prompt) -> list[str]:
    """The call, and what the tool answers."""
    return [prompt.metadata["key"], str(prompt.answer)]


# Whose environment is in a virtual environment, or a server, of its own: tests/tasks/test_foreign.py. A judge is a
# model: tests/tasks/test_judged.py.
ELSEWHERE = ("verifiers", "gymnasium", "openenv", "judged")
for _name in [name for name in TASKS.names if name not in ELSEWHERE]:
    _members: dict[str, Any] = {"name": _name, "args": ARGS.get(_name, {}), "right": right, **TOGETHER}
    if (_name in HUB and _name != "gsm8k") or _name == "megatron_rl":
        _members["test_the_prompts_are_the_same_in_another_process"] = None  # they are made by one class
    if TASKS.load(_name).defaults.get("evaluation_only"):
        _members["splits"] = ("probe",)
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (TaskConformance,), _members)
Test_lookup.right = lookup  # noqa: F821
Test_megatron_rl.right = tagged  # noqa: F821
Test_harbor.right = written  # noqa: F821
Test_harbor.test_the_prompts_are_the_same_in_another_process = None  # noqa: F821, they are files
if missing_walls() is not None:
    del Test_harbor  # noqa: F821


@pytest.fixture(autouse=True)
def _given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a task needs besides: a folder for converted data, a server."""
    test = request.instance
    if getattr(test, "name", None) in {*HUB, "jsonl", "megatron_rl"}:
        test.args = {**test.args, "cache": str(tmp_path_factory.getbasetemp() / "converted")}
    if getattr(test, "name", None) == "harbor":
        test.args = {"path": str(request.getfixturevalue("harbor_tasks")), "commands": False, "answer": "answer.txt"}
        test.args["held_out"] = 0.3
    if getattr(test, "name", None) == "remote":
        test.args = {"url": request.getfixturevalue("address"), "task": {"name": "copy"}}


@pytest.fixture(scope="module")
def harbor_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks, some for each split."""
    folder = tmp_path_factory.mktemp("harbor")
    for word in ("ab", "cd", "ef", "gh", "ac", "bd", "eg", "fh"):
        write_task(folder / word, word)
    return folder


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a task that is served over HTTP."""
    config = Config.model_validate({"run": {"seed": 1}, "task": {"name": "copy"}})
    loop, ready = asyncio.new_event_loop(), threading.Event()
    runner = web.AppRunner(application(config), shutdown_timeout=0.1)

    async def listen() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready.set()

    def serve() -> None:
        loop.run_until_complete(listen())
        loop.run_forever()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(60)
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/copy"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class TestCalculator(ToolConformance):
    name = "calculator"
    calls: ClassVar = {"6*7": "42", "1/0": "error: '1/0' divides by zero"}


@pytest.mark.skipif(missing_walls() is not None, reason="the kernel gives no namespaces here")
class TestPython(ToolConformance):
    name = "python"
    calls: ClassVar = {"print(6 * 7)": "42"}
    args: ClassVar = {"seconds": 30.0}


for _kit in (TestCalculator, TestPython):
    for _test in TOGETHER:
        setattr(_kit, _test, None)


class Drawn(Copy):
    """Every process has prompts of its own."""

    def prompt(self, index: int) -> Prompt:
        return super().prompt(hash(f"{index}") % 1000 if index else 0)


class AllTrained(Copy):
    """Probes are trained."""

    def __init__(self, arguments, seed, split):
        super().__init__(arguments, seed, "train")


class Gone(Copy):
    """The second epoch lacks prompts."""

    def prompt(self, index: int) -> Prompt:
        found = super().prompt(index % self.size if index >= self.size else index)
        return replace(found, index=index, text="again=") if index > self.size else replace(found, index=index)


class Brittle(Copy):
    """Raises for some answers."""

    async def score(self, prompt, completion):
        return Score(reward=1 / len(completion.text))


class Low(Copy):
    """Worse than what a scorer that raises gives."""

    async def score(self, prompt, completion):
        return Score(reward=-1.0)


class Reversed(Copy):
    """The wrong answers earn more."""

    async def score(self, prompt, completion):
        return Score(reward=float(completion.text != prompt.answer))


@pytest.mark.parametrize(
    ("own", "test"),
    [
        (Drawn, "test_the_prompts_are_the_same_in_another_process"),
        (AllTrained, "test_no_probe_is_a_prompt_that_is_trained"),
        (Gone, "test_each_epoch_has_every_prompt"),
        (Brittle, "test_every_answer_gets_a_number_whatever_it_says"),
        (Low, "test_every_answer_gets_a_number_whatever_it_says"),
        (Reversed, "test_a_right_answer_is_worth_more_than_a_wrong_one"),
    ],
)
def test_a_task_that_breaks_a_promise_is_found_out(own, test):
    conformance = TaskConformance()
    conformance.name = f"{__file__}:{own.__name__}"
    with pytest.raises(AssertionError):
        getattr(conformance, test)()


class Fragile(Calculator):
    """Ends with an answer that it does not know."""

    async def call(self, argument: str) -> str:
        if not argument:
            os._exit(1)
        return await super().call(argument)


class Nameless(Calculator):
    """Says nothing."""

    description = ""


@pytest.mark.parametrize(
    ("own", "test", "failure"),
    [
        (Fragile, "test_no_argument_breaks_it", Exception),
        (Nameless, "test_the_policy_reads_what_it_is_for", AssertionError),
        (Calculator, "test_each_call_is_answered", AssertionError),
    ],
)
def test_a_tool_that_breaks_a_promise_is_found_out(own, test, failure):
    conformance = ToolConformance()
    conformance.name, conformance.calls = f"{__file__}:{own.__name__}", {"6*7": "43"}
    with pytest.raises(failure):
        getattr(conformance, test)()

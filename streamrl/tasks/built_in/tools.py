"""The task `tools`: any task of one turn, answered with the help of tools in as many turns as that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

from pydantic import Field

from streamrl.config.task import TaskShare
from streamrl.tasks.arguments import ARGUMENTS, TaskArguments
from streamrl.tasks.arithmetic import calculate
from streamrl.tasks.environment import Around, Completion, Environment, Message, Prompt, Score
from streamrl.tasks.python_tool import Limits, PythonTool, missing_walls
from streamrl.tasks.tool_calls import ToolCall, describe_tools, parse_calls
from streamrl.tasks.turns import Observation, TurnByTurn

CALLS = "tool_calls"
# The reward part that counts the calls of an answer.

DESCRIPTIONS = {
    "calculator": "the value of an arithmetic expression with + - * / // % ** and parentheses",
    "python": "runs Python code and gives what it prints",
}


class ToolsArguments(TaskArguments):
    """Arguments of `tools`."""

    task: TaskShare = Field(description="the task whose prompts are asked and whose scorer judges the last turn")
    tools: tuple[Literal["calculator", "python"], ...] = Field(("calculator",), description="the tools that there are")
    max_turns: int = Field(4, ge=1, description="turns of the policy, the last answer among them")
    role: str = Field("tool", description="role of a tool's answer, as the model's chat template calls it")
    seconds: float = Field(5.0, gt=0, description="seconds that one run of Python code may take")
    memory: int = Field(512, ge=64, description="MiB of memory of one run of Python code")
    parallel: int = Field(2, ge=1, description="runs of Python code at once")
    allow_unwalled: bool = Field(False, description="run Python code also where the kernel gives no namespaces")


class Tools(TurnByTurn, Around):
    """Reward: that of the task for the last turn. A turn without a call is the last one."""

    Arguments = ToolsArguments

    def __init__(self, arguments: ToolsArguments, task: Environment, seed: int, split: str) -> None:
        """Raises ValueError where code would have no walls around it, and that is not allowed."""
        if task.has_turns:
            name = arguments.task.name
            raise ValueError(f"{ARGUMENTS}.task.name: {name} has turns of its own; allowed: a task of one turn")
        self._task = task
        self.lowest_reward, self.infrastructure = task.lowest_reward, task.infrastructure
        self._role = arguments.role
        self.max_turns = arguments.max_turns
        self._tools: dict[str, Callable[[str], Awaitable[str]]] = {}
        if "calculator" in arguments.tools:
            self._tools["calculator"] = _calculated
        if "python" in arguments.tools:
            self._tools["python"] = _python(arguments).run
        self._described = describe_tools([(name, DESCRIPTIONS[name]) for name in self._tools])

    def prompt(self, index: int) -> Prompt:
        """The task's own, and what tools there are."""
        return self._with_tools(self._task.prompt(index))

    async def fetch(self, index: int) -> Prompt:
        return self._with_tools(await self._task.fetch(index))

    def _with_tools(self, prompt: Prompt) -> Prompt:
        if prompt.text is not None:
            return replace(prompt, text=f"{self._described}\n{prompt.text}")
        first, *rest = prompt.messages or ()
        if first["role"] != "system":
            return replace(prompt, messages=(Message(role="system", content=self._described), first, *rest))
        told = Message(role="system", content=f"{first['content']}\n{self._described}")
        return replace(prompt, messages=(told, *rest))

    async def observation(self, prompt: Prompt, turns: Sequence[Completion]) -> Observation | None:
        calls = parse_calls(turns[-1].text)
        if not calls:
            return None
        answers = await asyncio.gather(*(self._answer(call) for call in calls))
        if prompt.messages is None:
            return "".join(f"\n<result>{answer}</result>\n" for answer in answers)
        return [Message(role=self._role, content=answer) for answer in answers]

    async def trajectory_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
        score = await self._task.score(prompt, turns[-1])
        calls = sum(len(parse_calls(turn.text)) for turn in turns)
        return replace(score, parts={**score.parts, CALLS: float(calls)})

    async def close(self) -> None:
        await self._task.close()

    async def _answer(self, call: ToolCall) -> str:
        if call.error is not None:
            return f"error: {call.error}"
        if call.name not in self._tools:
            return f"error: no tool {call.name!r}; there are {', '.join(self._tools)}"
        return await self._tools[call.name](call.argument)


async def _calculated(expression: str) -> str:
    try:
        return calculate(expression)
    except ValueError as error:
        return f"error: {error}"


def _python(arguments: ToolsArguments) -> PythonTool:
    missing = missing_walls()
    if missing is not None and not arguments.allow_unwalled:
        raise ValueError(
            f"{ARGUMENTS}.tools: python is not allowed here ({missing}); allowed: calculator, or python with "
            f"{ARGUMENTS}.allow_unwalled: true"
        )
    limits = Limits(seconds=arguments.seconds, memory=arguments.memory << 20)
    return PythonTool(limits, parallel=arguments.parallel, walls=missing is None)

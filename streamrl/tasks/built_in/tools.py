"""The task `tools`: any task of one turn, answered with the help of tools in as many turns as that takes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field, model_validator

from streamrl.choices import TOOLS
from streamrl.config.task import TaskShare
from streamrl.tasks.arguments import ARGUMENTS, TaskArguments
from streamrl.tasks.environment import Around, Completion, Environment, Message, Prompt, Score
from streamrl.tasks.failures import ScorerLate, ScorerLost, ScorerRaised, describe
from streamrl.tasks.hosted_tool import HostedTool
from streamrl.tasks.starter import Starter
from streamrl.tasks.tool_calls import FunctionCall, ToolCall, describe_tools, parse_calls
from streamrl.tasks.tools.base import Tool
from streamrl.tasks.turns import Observation, TurnByTurn

# The reward part that counts the calls of an answer.
CALLS = "tool_calls"

# The argument of a tool in the form that the model's chat template tells of.
INPUT = "input"


class ToolsArguments(TaskArguments):
    """Arguments of `tools`."""

    task: TaskShare = Field(description="the task whose prompts are asked and whose scorer judges the last turn")
    tools: tuple[Annotated[str, TOOLS], ...] = Field(("calculator",), description="the tools that there are")
    max_turns: int = Field(4, ge=1, description="turns of the policy, the last answer among them")
    role: str = Field("tool", description="role of a tool's answer, as the model's chat template calls it")
    seconds: float = Field(
        5.0, gt=0, description="seconds that one run of Python code, or one call of a tool of yours, may take"
    )
    memory: int = Field(512, ge=64, description="MiB of memory of one run of Python code")
    parallel: int = Field(2, ge=1, description="runs of Python code, or calls of a tool of yours, at once")
    allow_unwalled: bool = Field(False, description="run Python code also where the kernel gives no namespaces")

    @model_validator(mode="after")
    def _each_tool_has_a_name(self) -> ToolsArguments:
        names = [path.rpartition(":")[2] for path in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"tools: {name!r} is there twice; allowed: one tool of each name")
        return self


class Tools(TurnByTurn, Around):
    """Reward: that of the task for the last turn. A turn without a call is the last one."""

    Arguments = ToolsArguments
    starter = Starter(
        args={"task": {"name": "reasoning_gym", "args": {"dataset": "chain_sum"}}, "tools": ["calculator"]},
        max_new_tokens=64,
    )

    def __init__(self, arguments: ToolsArguments, task: Environment, seed: int, split: str) -> None:
        """Raises ValueError for a task of several turns, or a judge of groups; and where code would have no walls, and
        that is not allowed.
        """
        if task.has_turns:
            name = arguments.task.name
            raise ValueError(f"{ARGUMENTS}.task.name: {name} has turns of its own; allowed: a task of one turn")
        self._judge_by(task, arguments.task.name)
        self._role = arguments.role
        self.max_turns = arguments.max_turns
        self._tools = {path.rpartition(":")[2]: _built(path, arguments) for path in arguments.tools}
        described = [(path.rpartition(":")[2], TOOLS.load(path).description) for path in arguments.tools]
        self._described = describe_tools(described)
        self._offered = tuple(_function(name, text) for name, text in described)

    def prompt(self, index: int) -> Prompt:
        """The task's own, and what tools there are: in words, or where calls are parsed, by the chat template."""
        return self._with_tools(self._task.prompt(index))

    async def fetch(self, index: int) -> Prompt:
        return self._with_tools(await self._task.fetch(index))

    def _with_tools(self, prompt: Prompt) -> Prompt:
        if prompt.text is not None:
            return replace(prompt, text=f"{self._described}\n{prompt.text}")
        if self._parses:
            return replace(prompt, tools=self._offered)
        first, *rest = prompt.messages or ()
        if first["role"] != "system":
            return replace(prompt, messages=(Message(role="system", content=self._described), first, *rest))
        instructions = Message(role="system", content=f"{first['content']}\n{self._described}")
        return replace(prompt, messages=(instructions, *rest))

    async def observation(self, prompt: Prompt, turns: Sequence[Completion]) -> Observation | None:
        calls = self._calls(turns[-1])
        if not calls:
            return None
        answers = await asyncio.gather(*(self._answer(call) for call in calls))
        if prompt.messages is None:
            return "".join(f"\n<result>{answer}</result>\n" for answer in answers)
        return [Message(role=self._role, content=answer) for answer in answers]

    async def trajectory_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
        score = await self._task.score(prompt, turns[-1])
        calls = sum(len(self._calls(turn)) for turn in turns)
        return replace(score, parts={**score.parts, CALLS: float(calls)})

    async def close(self) -> None:
        await asyncio.gather(*(tool.close() for tool in self._tools.values()))
        await self._task.close()

    @property
    def _parses(self) -> bool:
        """Are calls in the model's own form?"""
        return self.parsers is not None and self.parsers.tools is not None

    def _calls(self, turn: Completion) -> list[ToolCall]:
        """The calls of an answer; none in its reasoning, where that is parsed."""
        if self.parsers is None:
            return parse_calls(turn.text)
        said = self.parsers.said(turn, self._offered)
        if self.parsers.tools is None:
            return parse_calls(said.text)
        return [_of_one_argument(call) for call in said.calls]

    async def _answer(self, call: ToolCall) -> str:
        if call.error is not None:
            return f"error: {call.error}"
        if call.name not in self._tools:
            return f"error: no tool {call.name!r}; there are {', '.join(self._tools)}"
        try:
            return await self._tools[call.name].call(call.argument)
        except (ValueError, ScorerRaised) as error:
            return f"error: {error}"
        except (ScorerLate, ScorerLost) as error:  # of the tool, whatever the task says of its own scorer
            raise ScorerRaised(describe(error), masked=True) from error


def _function(name: str, text: str) -> dict[str, Any]:
    """A tool as chat templates are told of it, in OpenAI's form: a function of one text."""
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def _of_one_argument(call: FunctionCall | ToolCall) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    if len(call.arguments) != 1:
        return ToolCall("", "", f"{call.name} takes one argument, {INPUT}")
    (argument,) = call.arguments.values()
    return ToolCall(call.name, argument if isinstance(argument, str) else json.dumps(argument))


def _built(path: str, arguments: ToolsArguments) -> Tool:
    """A built-in tool runs here, a class of the user's in processes of its own."""
    tool: type[Tool] = TOOLS.load(path)
    return tool.build(arguments) if TOOLS.is_built_in(path) else HostedTool(path, arguments)

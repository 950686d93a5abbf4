"""What a tool must do: say what it is for, answer calls in text, and survive any of them.

from streamrl.testing.tools import ToolConformance

class TestPopulations(ToolConformance):
    name = "tools.py:Populations"
    calls = {"Rome": "2800000"}
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from streamrl.choices import TOOLS
from streamrl.config.task import TaskShare
from streamrl.tasks.built_in.tools import Tools
from streamrl.tasks.registry import build_task
from streamrl.tasks.tool_calls import ToolCall, parse_calls
from streamrl.testing.declarations import Conformance, absolute
from streamrl.testing.tasks import STRANGE, Policy


class ToolConformance(Conformance):
    """Give `name`, some calls with their answers, and what else the task `tools` needs."""

    kind = TOOLS
    calls: ClassVar[dict[str, str]]  # argument -> answer
    args: ClassVar[dict[str, Any]] = {}

    def test_the_policy_reads_what_it_is_for(self) -> None:
        assert self.declaration.description.strip()
        assert "\n" not in self.declaration.description
        prompt = self._task().prompt(0).text or ""
        assert f"{self._called}: {self.declaration.description}" in prompt

    def test_the_policy_can_call_it_by_its_name(self) -> None:
        for argument in self.calls:
            assert parse_calls(self._call(argument)) == [ToolCall(self._called, argument)]

    def test_each_call_is_answered(self) -> None:
        assert self._answers(*self.calls) == list(self.calls.values())

    def test_no_argument_breaks_it(self) -> None:
        answers = self._answers(*STRANGE, *self.calls)
        assert answers[len(STRANGE) :] == list(self.calls.values()), f"after {answers[: len(STRANGE)]}"

    @property
    def _called(self) -> str:
        return self.name.rpartition(":")[2]

    def _call(self, argument: str) -> str:
        return f'<tool name="{self._called}">{argument}</tool>'

    def _answers(self, *arguments: str) -> list[str]:
        """What the policy reads of each call, made where a worker makes it."""

        async def ask() -> list[str]:
            task = self._task()
            prompt, policy = task.prompt(0), Policy([self._call(argument) for argument in arguments])
            try:
                turns = await policy.generate(prompt.content, len(arguments))
                observed = [await task.observation(prompt, [turn]) for turn in turns]
            finally:
                await task.close()
                await task.close()  # may be called twice
            return [str(each).removeprefix("\n<result>").removesuffix("</result>\n") for each in observed]

        return asyncio.run(ask())

    def _task(self) -> Tools:
        args = {"task": {"name": "copy"}, "tools": [absolute(self.name)]} | self.args
        task = build_task(TaskShare(name="tools", args=args), 1, "train")
        assert isinstance(task, Tools)
        return task

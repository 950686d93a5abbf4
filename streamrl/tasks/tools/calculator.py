"""The tool `calculator`."""

from __future__ import annotations

from streamrl.tasks.arithmetic import calculate
from streamrl.tasks.tools.base import Tool


class Calculator(Tool):
    """`6*7` is answered by `42`."""

    description = "the value of an arithmetic expression with + - * / // % ** and parentheses"

    async def call(self, argument: str) -> str:
        return calculate(argument)

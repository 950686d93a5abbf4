"""The tool `python`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.tasks.arguments import ARGUMENTS
from streamrl.tasks.python_tool import Limits, PythonTool, missing_walls
from streamrl.tasks.tools.base import Tool

if TYPE_CHECKING:
    from streamrl.tasks.built_in.tools import ToolsArguments


class Python(Tool):
    """Code of the policy, run in a process without network, within limits and a deadline."""

    description = "runs Python code and gives what it prints"

    def __init__(self, runs: PythonTool) -> None:
        self._runs = runs

    @classmethod
    def build(cls, arguments: ToolsArguments) -> Python:
        missing = missing_walls()
        if missing is not None and not arguments.allow_unwalled:
            raise ValueError(
                f"{ARGUMENTS}.tools: python is not allowed here ({missing}); allowed: calculator, or python with "
                f"{ARGUMENTS}.allow_unwalled: true"
            )
        limits = Limits(seconds=arguments.seconds, memory=arguments.memory << 20)
        return cls(PythonTool(limits, parallel=arguments.parallel, walls=missing is None))

    async def call(self, argument: str) -> str:
        return await self._runs.run(argument)

"""A tool of the user's as the worker sees it: its class runs in processes of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.config.task import ScoringConfig
from streamrl.tasks.arguments import ARGUMENTS
from streamrl.tasks.host_pool import HostPool
from streamrl.tasks.host_wire import Call, Task
from streamrl.tasks.tools.base import Tool

if TYPE_CHECKING:
    from streamrl.tasks.built_in.tools import ToolsArguments


class HostedTool(Tool):
    """Calls `Class().call(argument)` there."""

    def __init__(self, path: str, arguments: ToolsArguments) -> None:
        settings = ScoringConfig(processes=arguments.parallel, timeout=arguments.seconds)
        task = Task(function=path, timeout=arguments.seconds, limit=f"{ARGUMENTS}.seconds")
        self._pool = HostPool(task, path.rpartition(":")[2], settings)

    async def call(self, argument: str) -> str:
        """Raises ScorerRaised for what the class raises, ScorerLate and ScorerLost for what its process does."""
        return str((await self._pool.call(Call(method="function", arguments=[argument]), again=False)).value)

    async def close(self) -> None:
        await self._pool.close()

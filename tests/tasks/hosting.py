"""Tasks of the user's in processes of their own, for tests: a module is written, and a class of it hosted."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from streamrl.config.task import TaskConfig
from streamrl.tasks.environment import Completion, Environment, Rollout
from streamrl.tasks.hosted import host_task

DEADLINE = 60.0  # seconds; starts of processes on busy cores
TIMEOUT = 1.5  # task.scoring.timeout of these tests


class Hosting:
    """`async with hosting(CLASS, run, **scoring) as task`: a class of the module `source`, written to `folder`.

    run: keys of `task`, its `args` among them.

    Fails where a process of the task is left behind it.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self.file = folder / "mine.py"
        self.file.write_text(textwrap.dedent(source))

    @asynccontextmanager
    async def __call__(self, name: str, run: dict[str, Any] | None = None, **scoring: Any) -> AsyncIterator[Any]:
        settings = {"timeout": TIMEOUT, "start_timeout": DEADLINE, **scoring}
        config = TaskConfig.model_validate({"name": f"{self.file}:{name}", **(run or {}), "scoring": settings})
        task = await host_task(config, 1, "train", config)
        try:
            yield task
        finally:
            await task.close()
        assert not processes()

    def line(self, text: str) -> str:
        """FILE:LINE of the first line of the module that has `text`."""
        lines = self.file.read_text().splitlines()
        return f"{self.file}:{next(number for number, each in enumerate(lines, 1) if text in each)}"


def processes() -> list[int]:
    """Those that host a task of this one's."""
    children = psutil.Process().children()
    return [child.pid for child in children if "streamrl.tasks.host_process" in " ".join(child.cmdline())]


def go(work: Coroutine[Any, Any, Any]) -> Any:
    async def in_time() -> Any:
        async with asyncio.timeout(2 * DEADLINE):
            return await work

    return asyncio.run(in_time())


def completion(text: str) -> Completion:
    ids = np.zeros(2, np.int32)
    return Completion(
        text=text, prompt_ids=ids, output_ids=ids, logprobs=ids.astype(np.float32), spans=(), finish_reason="stop"
    )


async def scored(task: Environment, *texts: str, index: int = 3) -> list[Rollout]:
    return await task.score_all(await task.fetch(index), [completion(text) for text in texts])

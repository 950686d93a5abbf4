"""A frozen engine as a judge: a question in, texts out. Whatever goes wrong says nothing of the answer judged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.config import Config
from streamrl.engine.client import EngineError
from streamrl.tasks.environment import Message
from streamrl.tasks.failures import ScorerUnready

if TYPE_CHECKING:
    from streamrl.generate.engines.base import Engine

# (question, n): the texts of n answers, those that came. Raises ScorerUnready.
Ask = Callable[[str, int], Awaitable[list[str]]]


@asynccontextmanager
async def judging(engine: Engine, config: Config, scratch: Path, *, greedy: bool) -> AsyncIterator[Ask]:
    """Ask in a conversation of one message, in the sampling of `config`, within its `generate.request_timeout`.

    Raises ScorerUnready where the engine cannot be asked.
    """
    try:
        serving = engine.handles(config, scratch)
        handles = await serving.__aenter__()
    except (EngineError, OSError, ValueError) as error:
        raise ScorerUnready(f"judge: {error}") from error

    async def ask(question: str, n: int) -> list[str]:
        deadline = asyncio.get_running_loop().time() + config.request_timeout
        handle = handles(greedy=greedy, deadline=deadline)
        try:
            answers = await handle.generate([Message(role="user", content=question)], n)
        except (EngineError, ValueError) as error:
            raise ScorerUnready(f"judge: {error}") from error
        found = [answer.text for answer in answers if answer.finish_reason != "abort"]
        if not found:
            raise ScorerUnready(f"judge: {'; '.join(dict.fromkeys(handle.failures)) or 'no answer'}")
        return found

    try:
        yield ask
    finally:
        await serving.__aexit__(None, None, None)

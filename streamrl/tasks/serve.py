"""`python -m streamrl.tasks.serve CONFIG`: the tasks of a configuration as HTTP servers, for the task `remote`.

Each task of the configuration is at http://HOST:PORT/KEY. A host other than this machine's own needs --token-file.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from aiohttp import web

from streamrl.choices import TASKS
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.task import TaskConfig, TaskShare
from streamrl.tasks.environment import Completion, Environment, Prompt
from streamrl.tasks.failures import ScorerUnready, describe, is_masked
from streamrl.tasks.hosted import check_tasks, close_tasks, host_task
from streamrl.tasks.listening import is_local, run
from streamrl.tasks.remote_protocol import (
    LARGEST,
    About,
    AskObservation,
    AskPrompt,
    AskScores,
    Judged,
    Observed,
    RemotePrompt,
    RemoteScore,
    Turn,
)
from streamrl.tasks.turns import TurnByTurn

SPLITS: tuple[Literal["train", "probe"], ...] = ("train", "probe")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ServedTask:
    """One task behind its four paths, in processes of its own where it is the user's. `start` and `close` it."""

    def __init__(self, share: TaskShare, config: Config) -> None:
        self._share = share
        self._config = config
        self._splits: dict[str, Environment] = {}

    async def start(self) -> None:
        """Load both splits, which share nothing but their scorer. Raises ValueError, ScorerUnready."""
        for split in SPLITS:
            self._splits[split] = await host_task(self._share, self._config.run.seed, split, _run(self._config))

    @property
    def _task(self) -> Environment:
        return self._splits["train"]

    async def about(self, _: bytes) -> About:
        turns = self._task.max_turns if isinstance(self._task, TurnByTurn) else 1
        return About(turns, self._task.lowest_reward, self._task.judges_groups)

    async def prompt(self, body: bytes) -> RemotePrompt:
        asked = msgspec.json.decode(body, type=AskPrompt)
        return RemotePrompt.of(await self._splits[asked.split].fetch(asked.index))

    async def observation(self, body: bytes) -> Observed:
        asked = msgspec.json.decode(body, type=AskObservation)
        if not isinstance(self._task, TurnByTurn):
            return Observed()
        found = await self._task.observation(asked.prompt.prompt(), _completions(asked.turns))
        return Observed(text=found) if found is None or isinstance(found, str) else Observed(messages=tuple(found))

    async def score(self, body: bytes) -> Judged:
        asked = msgspec.json.decode(body, type=AskScores)
        prompt = asked.prompt.prompt()
        if isinstance(self._task, TurnByTurn):
            judging = (self._judged(self._task, prompt, _completions(turns)) for turns in asked.answers)
            return Judged(tuple(await asyncio.gather(*judging)))
        rollouts = await self._task.score_all(prompt, [_completions(turns)[-1] for turns in asked.answers])
        return Judged(tuple(RemoteScore(each.reward, each.parts, each.failure, each.masked) for each in rollouts))

    async def _judged(self, task: TurnByTurn, prompt: Prompt, turns: Sequence[Completion]) -> RemoteScore:
        try:
            score = await task.score_turns(prompt, turns)
        except Exception as error:  # the policy for foreign scorers: it goes to the caller, who counts it
            masked = is_masked(error, task.infrastructure)
            return RemoteScore(task.lowest_reward, failure=describe(error), masked=masked)
        return RemoteScore(score.reward, score.parts)

    async def close(self) -> None:
        await close_tasks(self._splits)


def application(config: Config, token: str | None = None) -> web.Application:
    """The server of all trained tasks of `config`. Raises ValueError for task arguments that do not fit."""
    app = web.Application(client_max_size=LARGEST, middlewares=[guarded(token)])
    for share in config.task.shares:
        if TASKS.is_built_in(share.name):  # before one is built, which may ask for a server
            _check_served(share.name, TASKS.load(share.name))
        check_tasks([share], config.run.seed, "train", _run(config), _check_served)
        served = ServedTask(share, config)
        app.router.add_get(f"/{share.key}/about", _handler(served.about))
        for method in (served.prompt, served.observation, served.score):
            app.router.add_post(f"/{share.key}/{method.__name__}", _handler(method))
        app.on_startup.append(_calling(served.start))
        app.on_cleanup.append(_calling(served.close))
    return app


def _run(config: Config) -> TaskConfig:
    """What a served task is told of a run: processes and deadlines, and no parsers, as callers send plain texts."""
    return TaskConfig(scoring=config.task.scoring)


def _check_served(name: str, task: Environment | type[Environment]) -> None:
    """Raises ValueError for a task whose episodes ask the policy by themselves: a caller could only have its texts."""
    kind = task if isinstance(task, type) else type(task)
    if task.has_turns and not issubclass(kind, TurnByTurn):
        raise ValueError(
            f"task.name: {name} cannot be served, as its episodes ask the policy by themselves; allowed: a task "
            "of one turn, or a subclass of TurnByTurn"
        )


def _handler(method: Callable[[bytes], Awaitable[Any]]) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        try:
            reply = await method(await request.read())
        except (msgspec.DecodeError, ValueError) as error:
            return web.Response(status=400, text=f"{error}"[:500])
        return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

    return answer


def guarded(token: str | None) -> Any:
    """The middleware that asks for a bearer token; None: for none."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
            return web.Response(status=401, text="the bearer token is missing or wrong")
        return await handler(request)

    return guard


def _calling(method: Callable[[], Awaitable[None]]) -> Callable[[web.Application], Awaitable[None]]:
    async def call(_: web.Application) -> None:
        await method()

    return call


def _completions(turns: Sequence[Turn]) -> list[Completion]:
    """Turns as environments take them: their texts, without tokens."""
    return [
        Completion(
            text=turn.text,
            prompt_ids=np.empty(0, np.int32),
            output_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            spans=(),
            finish_reason=turn.finish_reason,
        )
        for turn in turns
    ]


def main() -> int:
    """Serve until a signal comes. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m streamrl.tasks.serve", description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("override", nargs="*", metavar="key=value", help="keys that differ from the file")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default %(default)s)")
    parser.add_argument("--port", type=int, default=7000, help="(default %(default)s)")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token that callers must have")
    options = parser.parse_args()
    try:
        config = config_file.load(options.config, options.override)
        token = options.token_file.read_text().strip() if options.token_file else None
        if token is None and not is_local(options.host):
            raise ValueError(f"--host: {options.host} is open to others; allowed: with --token-file FILE")
        run(application(config, token), options.host, options.port)
    except (ValueError, OSError, ScorerUnready) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

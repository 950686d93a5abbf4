"""`python -m streamrl.tasks.megatron_rl.environment_server --env-config FILE`: an agent as an environment server.

The first entry of a task file is served, an agent or a task of one turn, with the routes of `wire.py`: to the agent
`RemoteAgent` of a streamrl run, or to Megatron-RL's.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel, TypeAdapter, ValidationError

from streamrl.config.task import TaskShare
from streamrl.config.task_file import read_entries
from streamrl.tasks.episodes import together
from streamrl.tasks.failures import describe
from streamrl.tasks.listening import is_local, run
from streamrl.tasks.megatron_rl.agents import (
    Agent,
    ContrastiveRolloutGenerator,
    EvaluationAgent,
    GroupedRolloutGenerator,
    RolloutGenerator,
    TokenizedRolloutGenerator,
)
from streamrl.tasks.megatron_rl.environment_agent import EnvironmentAgent
from streamrl.tasks.megatron_rl.task import seed_all
from streamrl.tasks.megatron_rl.wire import (
    LARGEST,
    RemoteEvaluationRequest,
    RemoteGroupedRolloutRequest,
    RemoteRolloutRequest,
)
from streamrl.tasks.named import load_named
from streamrl.tasks.serve import guarded

_JSON: TypeAdapter[Any] = TypeAdapter(Any)


class Served:
    """An agent behind the routes that fit its kind."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._drawing = asyncio.Lock()

    def application(self, token: str | None) -> web.Application:
        app = web.Application(client_max_size=LARGEST, middlewares=[guarded(token)])
        routes: list[tuple[Any, str, type[BaseModel], Callable[[Any], Awaitable[Any]]]] = [
            (GroupedRolloutGenerator, "grouped_rollouts", RemoteGroupedRolloutRequest, self._groups),
            (ContrastiveRolloutGenerator, "contrastive_rollouts", RemoteRolloutRequest, self._pairs),
            (RolloutGenerator | TokenizedRolloutGenerator, "rollouts", RemoteRolloutRequest, self._rollouts),
            (EvaluationAgent, "evaluation", RemoteEvaluationRequest, self._evaluation),
        ]
        for kind, name, request, answer in routes:
            if isinstance(self._agent, kind):
                app.router.add_post(f"/{name}/", _handler(request, answer))
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        if hasattr(self._agent, "close"):
            await self._agent.close()

    async def _groups(self, request: RemoteGroupedRolloutRequest) -> Any:
        """Raises ValueError for groups that are to be filtered, which is the caller's matter here."""
        if request.filter_groups_with_same_reward:
            raise ValueError("filter_groups_with_same_reward: true is not allowed; allowed: false")
        seeds = [None if request.seed is None else request.seed + place for place in range(request.num_groups)]
        return await together(self._group(request, seed) for seed in seeds)

    async def _group(self, request: RemoteGroupedRolloutRequest, seed: int | None) -> list[Any]:
        async with self._drawing:
            if seed is not None:
                seed_all(seed)
            params = await self._agent.prepare_group_rollout(request)

        async def rollout() -> Any:
            return await params.build_rollout(await params.run_episode())

        return await together(rollout() for _ in range(request.rollouts_per_group))

    async def _pairs(self, request: RemoteRolloutRequest) -> Any:
        return await self._agent.get_contrastive_rollouts(request)

    async def _rollouts(self, request: RemoteRolloutRequest) -> Any:
        return await self._agent.get_reward_rollouts(request)

    async def _evaluation(self, request: RemoteEvaluationRequest) -> Any:
        return await self._agent.run_evaluation(request)


def _handler(kind: Any, answer: Callable[[Any], Awaitable[Any]]) -> Any:
    async def handle(call: web.Request) -> web.Response:
        try:
            request = kind.model_validate_json(await call.read())
            request.inference_interface = request.inference_interface.unwrap()
        except (ValidationError, ValueError) as error:
            return web.Response(status=422, text=f"{error}"[:500])
        try:
            reply = await answer(request)
        except Exception as error:  # whatever the agent raises is told to the caller, who counts it
            return web.Response(status=500, text=describe(error))
        return web.Response(body=_JSON.dump_json(reply, serialize_as_any=True), content_type="application/json")

    return handle


def agent_of(file: Path, seed: int) -> Any:
    """The agent of the first entry of a task file. Raises ValueError, with one line."""
    share = TaskShare.model_validate(read_entries(file)[0])
    if ":" not in share.name:
        return EnvironmentAgent(share, seed)
    try:
        named = load_named(share.name, "class")
    except Exception as error:  # whatever a module of the user's raises while it is imported
        raise ValueError(f"agent_type: {share.name} cannot be loaded: {describe(error)}") from None
    if not (isinstance(named, type) and issubclass(named, Agent)):
        return EnvironmentAgent(share, seed)
    try:
        return named(**share.args)
    except Exception as error:  # whatever a constructor of the user's raises
        raise ValueError(f"agent_args: {named.__name__} cannot be made: {describe(error)}") from None


def main() -> int:
    """Serve until a signal comes. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m streamrl.tasks.megatron_rl.environment_server", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--env-config", type=Path, required=True, help="task file, of which the first entry is served")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the task (default %(default)s)")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token that callers must have")
    parser.add_argument("--open", action="store_true", help="answer others without a token, as Megatron-RL asks")
    options = parser.parse_args()
    try:
        token = options.token_file.read_text().strip() if options.token_file else None
        if token is None and not options.open and not is_local(options.host):
            raise ValueError(f"--host: {options.host} is open to others; allowed: with --token-file FILE, or --open")
        run(Served(agent_of(options.env_config, options.seed)).application(token), options.host, options.port)
    except (ValueError, OSError) as error:
        print(f"environment_server: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""A router in front of a worker's servers: requests go through it, commands past it.

A small proxy replaces sglang-router: it passes on `/generate` in turns, without the fields that the router does not
know, and answers 404 to every command, as the router does. With `SGLANG_ROUTER=/path/to/sglang-router` in the
environment the real one is started in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from streamrl.config import Config
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.server import Server
from streamrl.generate.fleet import Fleet
from streamrl.generate.router import ROUTER
from streamrl.observe.events import EventLog, event_path
from streamrl.types import PolicyVersion

DEADLINE = 120.0  # seconds
PROMPT = [1, 4, 2, 8]
V1 = PolicyVersion(1)
REAL = os.environ.get("SGLANG_ROUTER")
DROPPED = ("cache_salt",)  # of a request, by sglang-router


@contextlib.asynccontextmanager
async def proxy(servers: Sequence[str]) -> AsyncIterator[str]:
    """Round robin over `servers`, for requests alone. Its address."""
    turns = itertools.cycle(servers)

    async def generate(request: web.Request) -> web.StreamResponse:
        body = {name: value for name, value in (await request.json()).items() if name not in DROPPED}
        headers = {name: value for name, value in request.headers.items() if name != "Content-Length"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{next(turns)}/generate", json=body, headers=headers) as answer,
        ):
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for some in answer.content.iter_any():
                await response.write(some)
            await response.write_eof()
            return response

    application = web.Application()
    application.router.add_post("/generate", generate)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def sglang_router(command: str, servers: Sequence[str], log: Path) -> AsyncIterator[str]:
    """The real one. Its address, once it answers for the servers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [command, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    words += ["--prometheus-port", str(port + 1), "--worker-urls", *servers]
    with log.open("wb") as output, subprocess.Popen(words, stdout=output, stderr=output) as process:
        try:
            await _until_it_answers(f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


async def _until_it_answers(address: str, log: Path) -> None:
    deadline, client = time.monotonic() + DEADLINE, EngineClient(address, 10.0)
    try:
        while True:
            try:
                await client.generate(PROMPT, {"max_new_tokens": 1}, 1)
                return
            except EngineError:
                assert time.monotonic() < deadline, log.read_text()
            await asyncio.sleep(0.5)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def router_of(servers: Sequence[str], folder: Path) -> AsyncIterator[str]:
    if REAL is None:
        async with proxy(servers) as address:
            yield address
    else:
        async with sglang_router(REAL, servers, folder / "router.log") as address:
            yield address


@pytest.mark.parametrize("stream_every", [0, 16])
def test_requests_go_through_the_router_once_every_server_has_their_version(
    fresh_server: Server, model_folders: tuple[Path, Path], tmp_path: Path, stream_every: int
) -> None:
    servers = (fresh_server.address, fresh_server.address.replace("127.0.0.1", "localhost"))
    sampling = {"temperature": 1.0, "max_new_tokens": 64, "ignore_eos": True}

    async def run() -> list[list[Answer]]:
        async with router_of(servers, tmp_path) as address:
            generate = {"servers": 2, "attach": servers, "router": address, "stream_every": stream_every}
            config = Config.model_validate({"model": {"path": model_folders[0]}, "generate": generate})
            fleet = Fleet(config.of_worker(0), tmp_path, 0, EventLog(event_path(tmp_path, "generator"), "generator-0"))
            try:
                await fleet.start()
                policy = fleet.policy("group", V1)
                waiting = [asyncio.create_task(policy.generate(PROMPT, sampling, n)) for n in (1, 2, 3, 1)]
                first, second = fleet.servers.values()
                fleet.set_version(first, V1)
                await asyncio.sleep(0.1)
                assert fleet.choose("group", V1, None) is None
                assert not any(task.done() for task in waiting)
                fleet.set_version(second, V1)
                assert fleet.choose("group", V1, None).server == ROUTER
                return await asyncio.gather(*waiting)
            finally:
                await fleet.close()

    groups = asyncio.run(run())
    assert [len(answers) for answers in groups] == [1, 2, 3, 1]
    assert all(len(answer.output_ids) == 64 for answers in groups for answer in answers)


def test_a_request_behind_a_router_is_ended_by_its_id(
    fresh_server: Server, model_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    servers = (fresh_server.address, fresh_server.address.replace("127.0.0.1", "localhost"))

    async def run() -> Answer:
        async with router_of(servers, tmp_path) as address:
            generate = {"servers": 2, "attach": servers, "router": address}
            config = Config.model_validate({"model": {"path": model_folders[0]}, "generate": generate})
            fleet = Fleet(config.of_worker(0), tmp_path, 0, EventLog(event_path(tmp_path, "generator"), "generator-0"))
            try:
                await fleet.start()
                policy = fleet.policy("group", PolicyVersion(0))
                long = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}
                asking = asyncio.create_task(policy.generate(PROMPT, long, 1, "request"))
                async with asyncio.timeout(DEADLINE):
                    while not asking.done():  # the first words may overtake the request on its way
                        await asyncio.sleep(0.05)
                        await policy.abort("request")
                    return (await asking)[0]
            finally:
                await fleet.close()

    answer = asyncio.run(run())
    assert answer.meta_info.finish_reason.type == "abort"
    assert len(answer.output_ids) < 400


def test_a_router_passes_on_by_which_name_the_cache_is_asked_for(
    fresh_server: Server, tmp_path: Path, cached: list[int]
) -> None:
    prompt = [1 + place * place % 8 for place in range(40)]

    async def run() -> None:
        async with router_of([fresh_server.address], tmp_path) as address:
            client = EngineClient(address, DEADLINE)
            try:
                for cache in ("7.0", "7.0", "8.0"):
                    await client.generate(prompt, {"max_new_tokens": 1}, 1, cache=cache)
            finally:
                await client.close()

    asyncio.run(run())
    assert cached[-3:] == [0, len(prompt) - 1, 0]  # the real router was asked for a token before

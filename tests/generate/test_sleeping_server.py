"""The learner's turn on the device of a server, as a server on a GPU is told of it: here by one that only listens."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from streamrl.config import Config
from streamrl.generate.served import ServedModel

PAUSE, RESUME = "/pause_generation", "/continue_generation"
RELEASE, TAKE = "/release_memory_occupation", "/resume_memory_occupation"


def called(orders: list[str], folder: Path) -> list[str]:
    """The paths that these methods of a ServedModel call, one after the other."""
    paths: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response()

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/{path}", handle)
        async with TestServer(app) as server:
            served = ServedModel(
                Config.model_validate({"generate": {"attach": [str(server.make_url("/"))]}}), folder, 0
            )
            try:
                for order in orders:
                    await getattr(served, order)()
                served.check()
            finally:
                await served.close()

    asyncio.run(run())
    return paths


def test_a_server_that_sleeps_is_not_told_to_release_its_memory_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("streamrl.generate.served.has_cuda", lambda: True)
    assert called(["sleep", "sleep", "wake", "sleep"], tmp_path) == [PAUSE, RELEASE, TAKE, RESUME, PAUSE, RELEASE]

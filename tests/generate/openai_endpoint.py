"""An OpenAI-compatible endpoint on this machine that speaks as SGLang 0.5.23 was recorded to, or as vLLM does.

`sglang_completion.json` is what a server answered; `test_engines_agree.py` compares its form with a real one's.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("sglang_completion.json").read_text())

Change = Callable[[dict[str, Any]], None]  # of a whole answer, in place


def vllm(answer: dict[str, Any]) -> None:
    """As vLLM 0.10.2 and newer: ids beside the text, and in the place of the log-probs' tokens."""
    for choice in answer["choices"]:
        choice["stop_reason"] = choice.pop("matched_stop")
        choice["prompt_logprobs"] = None
        choice["logprobs"]["tokens"] = [f"token_id:{token}" for token in choice["token_ids"]]


def older_vllm(answer: dict[str, Any]) -> None:
    """As vLLM before `return_token_ids`."""
    vllm(answer)
    for choice in answer["choices"]:
        del choice["token_ids"], choice["prompt_token_ids"]


def without_logprobs(answer: dict[str, Any]) -> None:
    for choice in answer["choices"]:
        choice["logprobs"] = None


class Endpoint:
    """What it was asked, and how its next answers differ from the recorded one."""

    def __init__(self) -> None:
        self.url = ""
        self.key: str | None = None  # that it asks for
        self.models: list[dict[str, Any]] = copy.deepcopy(RECORDED["models"]["data"])
        self.asked: list[dict[str, Any]] = []  # the bodies
        self.change: Change = lambda answer: None
        self.failures: list[int] = []  # statuses of the next answers; 0: the connection is cut
        self.stuck = False
        self.ended = asyncio.Event()

    async def list_models(self, request: web.Request) -> web.Response:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "Incorrect API key provided"}}, status=401)
        return web.json_response(RECORDED["models"] | {"data": self.models})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        while self.stuck:
            await asyncio.sleep(0.02)
        if self.failures:
            status = self.failures.pop(0)
            if status == 0:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return web.json_response(RECORDED["error"], status=status, headers={"Retry-After": "0"})
        answer = copy.deepcopy(RECORDED["completion"])
        (choice,) = answer["choices"]
        choice["prompt_token_ids"] = body["prompt"]
        answer["choices"] = [copy.deepcopy(choice) | {"index": index} for index in reversed(range(body["n"]))]
        self.change(answer)
        return web.json_response(answer)


@contextmanager
def serving() -> Iterator[Endpoint]:
    """One that listens in a thread of its own."""
    endpoint, loop, listening = Endpoint(), asyncio.new_event_loop(), threading.Event()

    async def run() -> None:
        application = web.Application()
        application.add_routes(
            [web.get("/v1/models", endpoint.list_models), web.post("/v1/completions", endpoint.complete)]
        )
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        listening.set()
        await endpoint.ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    listening.wait(30)
    try:
        yield endpoint
    finally:
        endpoint.stuck = False
        loop.call_soon_threadsafe(endpoint.ended.set)
        thread.join(30)
        loop.close()

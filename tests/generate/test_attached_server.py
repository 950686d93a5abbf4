"""An attached server that a worker left in the middle of an update is the next worker's as if nothing had happened."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.config import Config
from streamrl.engine.answers import Piece
from streamrl.engine.client import EngineClient, Interruption
from streamrl.engine.server import ServerFailed
from streamrl.generate import served as served_module
from streamrl.generate.served import INITIAL, UNNAMED, ServedModel
from streamrl.publish.transport import end_open_update
from streamrl.types import PolicyVersion
from tests.operations_table import GOES_ON, documented

TIMEOUT = 60.0
HANGS = 20.0  # seconds, for a few tokens
PROMPT = [1, 4, 2, 8]
LONG = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}
SHORT = {**LONG, "max_new_tokens": 8}


def test_one_that_was_started_again_by_whoever_keeps_it_is_lost(fresh_server, model_folders, tmp_path, monkeypatch):
    """It answers again before it was missed; its weights are those of its start."""
    monkeypatch.setattr(served_module, "HEALTH_PERIOD", 0.01)
    attached = {"model": {"path": model_folders[0]}, "generate": {"attach": [fresh_server.address]}}

    async def run() -> None:
        served = ServedModel(Config.model_validate(attached), tmp_path, index=0)
        try:
            await served.start()
            for name in ("1.0-partial", str(INITIAL)):  # a first load that is refused leaves what was there
                await served.client.update_weight_version(name, TIMEOUT)
                assert await served._ask(0) == 0
            watching = asyncio.create_task(served.watch())
            await served.client.update_weight_version("7.0", TIMEOUT)
            served.version = PolicyVersion(7)
            async with asyncio.timeout(HANGS):
                while not served._had_version:
                    await asyncio.sleep(0.01)
                assert not watching.done()
                await served.client.update_weight_version(UNNAMED, TIMEOUT)  # as SGLang calls them
                with pytest.raises(ServerFailed, match=r"its start, not 7\.0") as lost:
                    await watching
            documented(
                "server-... is lost: server-... was started again: ...", f"server-0 is lost: {lost.value}", GOES_ON
            )
        finally:
            await served.close()

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("version", ["0.0", "7.0", "7.0-partial"])
def test_a_server_that_was_left_paused_in_an_update_draws_from_the_initial_weights(
    fresh_server, model_folders, tmp_path, mode: Interruption, version: str
):
    """A request is running: in place, it stays in the batch."""
    attached = {"model": {"path": model_folders[0]}, "generate": {"attach": [fresh_server.address]}}

    async def run() -> None:
        client = EngineClient(fresh_server.address, TIMEOUT)
        served = ServedModel(Config.model_validate(attached), tmp_path, index=0)
        drawing = asyncio.Event()
        told: list[Piece] = []

        def add(piece: Piece) -> None:
            told.append(piece)
            drawing.set()

        left = asyncio.create_task(client.generate(PROMPT, LONG, 1, pieces=add, every=1))
        try:
            await drawing.wait()
            await client.pause(mode, TIMEOUT)
            await client.begin_weight_update(TIMEOUT)
            await client.update_weight_version(version, TIMEOUT)
            await served.start()
            async with asyncio.timeout(HANGS):
                (answer,) = await served.policy.generate(PROMPT, SHORT, 1)
                await left
            assert [span.version for span in answer.meta_info.weight_versions] == [str(INITIAL)]
            (*_, last) = told
            assert last.meta_info.finish_reason is not None
            assert last.meta_info.finish_reason.type == ("length" if version == str(INITIAL) else "abort")
            await client.begin_weight_update(TIMEOUT)  # the former one is over
        finally:
            left.cancel()
            await end_open_update(client, TIMEOUT)
            await client.resume(TIMEOUT)
            await served.close()
            await client.close()

    asyncio.run(run())

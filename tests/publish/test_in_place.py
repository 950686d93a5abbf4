"""`publish.interruption: in_place` at a real SGLang server: exact are all tokens but those that say that they are not.

The two models have nothing in common but their shape: what one of them computed is worth nothing to the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.engine.answers import Answer
from streamrl.engine.server import Server
from streamrl.generate.fleet import Fleet
from streamrl.observe.events import EventLog, event_path
from streamrl.publish.sources import make_source, make_staging
from streamrl.publish.staging import Staged
from streamrl.publish.transport import Source
from streamrl.types import PolicyVersion

TIMEOUT = 60.0
TOKENS = 800
PROMPT = [1 + place * place % 8 for place in range(60)]
LONG = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
SHORT = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
V0, V1 = PolicyVersion(0), PolicyVersion(1)
EXACT = 1e-4  # nats


@pytest.fixture
def on_fleet(fresh_server: Server, model_folders: tuple[Path, Path], tmp_path: Path) -> Callable[..., Any]:
    """`on_fleet(transport, work)`: what `work(fleet, publish)` gives, with one server at the first of the models.

    `publish()` brings it to the second.
    """
    folder, (first, second) = tmp_path, model_folders

    def run(transport: str, work: Callable) -> Any:
        publishing = {"transport": transport, "interruption": "in_place", "timeout": TIMEOUT, "bucket": 1 << 16}
        generate = {"attach": [fresh_server.address], "stream_every": 0}
        config = Config.model_validate({"model": {"path": first}, "publish": publishing, "generate": generate})

        async def working() -> Any:
            fleet = Fleet(config.of_worker(0), folder, 0, EventLog(event_path(folder, "generator"), "generator-0"))
            source, staging = make_source(config, folder, "tcp://127.0.0.1:1"), make_staging(config)
            staged = staging.fill(V1, load_file(second / "model.safetensors").items())
            try:
                await fleet.start()
                return await work(fleet, lambda: bring(fleet, source, staged))
            finally:
                source.close()
                await fleet.close()

        return asyncio.run(working())

    return run


async def bring(fleet: Fleet, source: Source, staged: Staged) -> None:
    (served,) = fleet.servers.values()
    manifest = source.manifest(served.state, staged)
    sending = asyncio.to_thread(source.send, served.state, staged, lambda: time.sleep(0.002))
    await asyncio.gather(sending, served.sink().apply(V1, manifest))
    fleet.set_version(served, V1)


def errors(answer: Answer, weights: dict[str, torch.Tensor], forward: Callable[..., torch.Tensor]) -> torch.Tensor:
    """|log-prob difference| [T] of an answer to PROMPT and a forward pass of `weights`."""
    reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
    return (forward(weights, [*PROMPT, *answer.output_ids])[len(PROMPT) - 1 :] - reported).abs()


@pytest.mark.parametrize("transport", ["memory", "broadcast", "broadcast over lazy", "disk"], indirect=True)
def test_a_request_behind_an_update_in_place_is_exact_and_reuses_what_its_own_version_computed(
    transport: str, on_fleet, model_folders, forward_logprobs, cached: list[int]
):
    async def work(fleet: Fleet, publish: Callable[[], Awaitable[None]]) -> list[Answer]:
        async def ask(version: PolicyVersion) -> Answer:
            (answer,) = await fleet.policy("group", version).generate(PROMPT, SHORT, 1)
            return answer

        before = [await ask(V0), await ask(V0)]
        await publish()
        return [*before, await ask(V1), await ask(V1)]

    answers = on_fleet(transport, work)
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    for answer, of in zip(answers, (0, 0, 1, 1), strict=True):
        (span,) = answer.meta_info.weight_versions
        assert (span.version, span.exact) == (f"{of}.0", True)
        assert errors(answer, weights[of], forward_logprobs).max() < EXACT
    assert cached == [0, len(PROMPT) - 1, 0, len(PROMPT) - 1]


def test_an_evaluation_of_a_version_reuses_nothing_of_the_one_before(
    on_fleet, model_folders, forward_logprobs, cached: list[int]
):
    """An evaluation asks one server, without a group."""

    async def work(fleet: Fleet, publish: Callable[[], Awaitable[None]]) -> list[Answer]:
        (served,) = fleet.servers.values()
        before = await served.policy.generate(PROMPT, SHORT, 1)
        await publish()
        return before + await served.policy.generate(PROMPT, SHORT, 1)

    answers = on_fleet("memory", work)
    for answer, folder in zip(answers, model_folders, strict=True):
        assert errors(answer, load_file(folder / "model.safetensors"), forward_logprobs).max() < EXACT
    assert cached == [0, 0]


def test_of_a_request_in_flight_the_tokens_behind_the_update_are_stamped_inexact(
    on_fleet, model_folders, forward_logprobs
):
    async def work(fleet: Fleet, publish: Callable[[], Awaitable[None]]) -> tuple[Answer, Answer]:
        drawn = asyncio.Event()
        ends = SimpleNamespace(found=lambda ids, start: drawn.set())  # sees the tokens as they come, and finds no end
        flying = asyncio.create_task(fleet.policy("early", V0).generate(PROMPT, LONG, 1, ends=ends))
        await drawn.wait()
        await publish()
        (late,) = await fleet.policy("late", V1).generate(PROMPT, SHORT, 1)
        return (await flying)[0], late

    early, late = on_fleet("memory", work)
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    old, new = early.meta_info.weight_versions
    assert [(old.version, old.exact), (new.version, new.exact)] == [("0.0", True), ("1.0", False)]
    assert (old.start, old.end, new.end) == (0, new.start, TOKENS)
    assert errors(early, weights[0], forward_logprobs)[: old.end].max() < EXACT
    assert errors(early, weights[1], forward_logprobs)[new.start :].max() > EXACT  # else the stamp would be for nothing
    assert [(span.version, span.exact) for span in late.meta_info.weight_versions] == [("1.0", True)]
    assert errors(late, weights[1], forward_logprobs).max() < EXACT

"""`publish.interruption: drain` at a real SGLang server: answers are of one version each, and none is lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient
from streamrl.generate.gate import GatedPolicy, RequestGate
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish.sources import make_source, make_staging
from streamrl.publish.transport import PublishError, Sink, Source
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

TIMEOUT = 60.0
STATE = ServerState(name="server-0", version=PolicyVersion(0))
PROMPTS = [[1, 4, 2, 8], [3, 3, 5], [7, 1, 0, 2, 5, 8]]
SAMPLING = {"temperature": 1.0, "max_new_tokens": 300, "ignore_eos": True}


def config_of(model: Path, transport: str, timeout: float) -> Config:
    publish = {"transport": transport, "interruption": "drain", "timeout": timeout, "bucket": 1 << 16}
    return Config.model_validate({"model": {"path": model}, "publish": publish})


async def publish(config: Config, source: Source, sink: Sink, folder: Path, step: int) -> None:
    staging = make_staging(config)
    staged = staging.fill(PolicyVersion(step), load_file(folder / "model.safetensors").items())
    manifest = source.manifest(STATE, staged)
    sending = asyncio.to_thread(source.send, STATE, staged, lambda: time.sleep(0.002))
    await asyncio.gather(sending, sink.apply(staged.version, manifest))


async def ask(policy: GatedPolicy, gate: RequestGate) -> list[asyncio.Task[list[Answer]]]:
    """Requests that are under way."""
    tasks = [asyncio.create_task(policy.generate(prompt, SAMPLING, 1)) for prompt in PROMPTS]
    while gate.inside < len(tasks):
        await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("transport", ["broadcast", "broadcast over lazy", "disk"], indirect=True)
def test_requests_in_flight_end_undisturbed_and_later_ones_wait_for_the_new_version(
    transport: str, fresh_server, model_folders, forward_logprobs: Callable[..., torch.Tensor], tmp_path
):
    async def run() -> list[Answer]:
        config = config_of(model_folders[0], transport, TIMEOUT)
        client, gate = EngineClient(fresh_server.address, TIMEOUT), RequestGate()
        policy, sink = GatedPolicy(client, gate), make_sink(config, client, gate)
        source = make_source(config, tmp_path, "tcp://127.0.0.1:1")
        try:
            early = await ask(policy, gate)
            publishing = asyncio.create_task(publish(config, source, sink, model_folders[1], 1))
            while gate.is_open and not publishing.done():
                await asyncio.sleep(0.01)
            late = [asyncio.create_task(policy.generate(prompt, SAMPLING, 1)) for prompt in PROMPTS]
            answers = await asyncio.gather(*early, *late)
            await publishing
            return [answer for (answer,) in answers]
        finally:
            source.close()
            await client.close()

    answers = asyncio.run(run())
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    for answer, prompt, of in zip(answers, [*PROMPTS, *PROMPTS], [0, 0, 0, 1, 1, 1], strict=True):
        spans = [(span.version, span.start, span.end) for span in answer.meta_info.weight_versions]
        assert spans == [(f"{of}.0", 0, 300)]
        assert answer.meta_info.finish_reason.type == "length"
        reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
        expected = forward_logprobs(weights[of], [*prompt, *answer.output_ids])[len(prompt) - 1 :]
        assert (expected - reported).abs().max() < 1e-4


def test_requests_that_do_not_end_in_time_cost_the_publish_and_go_on(fresh_server, model_folders, tmp_path):
    async def run() -> None:
        config = config_of(model_folders[0], "disk", 0.05)
        client, gate = EngineClient(fresh_server.address, TIMEOUT), RequestGate()
        policy, sink = GatedPolicy(client, gate), make_sink(config, client, gate)
        source = make_source(config, tmp_path, "tcp://127.0.0.1:1")
        try:
            tasks = await ask(policy, gate)
            with pytest.raises(PublishError, match=r"3 requests did not end in publish\.timeout=0\.05 s"):
                await publish(config, source, sink, model_folders[1], 1)
            answers = await asyncio.gather(*tasks, policy.generate(PROMPTS[0], SAMPLING, 1))
            for (answer,) in answers:
                assert [span.version for span in answer.meta_info.weight_versions] == ["0.0"]
                assert len(answer.output_ids) == 300
            config = config_of(model_folders[0], "disk", TIMEOUT)
            await publish(config, source, make_sink(config, client, gate), model_folders[1], 1)
            assert (await client.model_info()).weight_version == "1.0"
        finally:
            await client.close()

    asyncio.run(run())

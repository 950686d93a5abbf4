"""Weights through memory of one host: what a real SGLang server makes of them, and of what goes wrong on the way."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.config.file import ConfigError, load
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient
from streamrl.engine.kept_memory import DoubleMemory
from streamrl.generate.gate import RequestGate
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish.memory_source import MemorySource
from streamrl.publish.sources import make_source, make_staging
from streamrl.publish.staging import Staged, Staging
from streamrl.publish.transport import PublishError, Sink
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion
from tests.drawing import Drawing

TIMEOUT = 60.0
STATE = ServerState(name="server-0", version=PolicyVersion(0))
PROMPTS = [[1, 4, 2, 8], [3, 3, 5], [7, 1, 0, 2, 5, 8], [6, 8]]


def config_of(model: Path, **publish: object) -> Config:
    settings = {"transport": "memory", "timeout": TIMEOUT, "bucket": 1 << 16, **publish}
    return Config.model_validate({"model": {"path": model}, "publish": settings})


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def on_server(address: str, config: Config, work: Callable) -> object:
    async def run() -> object:
        client = EngineClient(address, TIMEOUT)
        try:
            return await work(client, make_sink(config, client, RequestGate()))
        finally:
            await client.close()

    return asyncio.run(run())


async def publish(config: Config, sink: Sink, staged: Staged) -> None:
    await sink.apply(staged.version, manifest_of(config, staged))


def manifest_of(config: Config, staged: Staged) -> dict[str, Any]:
    return make_source(config, Path("/nowhere"), "tcp://127.0.0.1:1").manifest(STATE, staged)


def test_versions_arrive_while_requests_are_in_flight_and_every_token_is_of_its_versions_weights(
    fresh_server, model_folders, forward_logprobs
):
    config = config_of(model_folders[0], verify_every=2)
    staging = make_staging(config)

    async def work(client: EngineClient, sink: Sink) -> list[Answer]:
        sampling = {"temperature": 1.0, "max_new_tokens": 300, "ignore_eos": True}
        drawings = [Drawing(client, prompt, sampling) for prompt in PROMPTS]
        for step in (1, 2):
            staged = staging.fill(PolicyVersion(step), weights_of(model_folders[step % 2]).items())
            await asyncio.gather(*(drawing.goes_on() for drawing in drawings))
            await publish(config, sink, staged)
        assert (await client.model_info()).weight_version == "2.0"
        return [await drawing.whole() for drawing in drawings]

    answers = on_server(fresh_server.address, config, work)
    weights = [weights_of(folder) for folder in model_folders]
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert (len(answer.output_ids), answer.meta_info.finish_reason.type) == (300, "length")
        assert [span.version for span in answer.meta_info.weight_versions] == ["0.0", "1.0", "2.0"]
        reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
        for span, of in zip(answer.meta_info.weight_versions, (0, 1, 0), strict=True):
            expected = forward_logprobs(weights[of], [*prompt, *answer.output_ids])[len(prompt) - 1 :]
            assert (expected - reported)[span.start : span.end].abs().max() < 1e-4


def test_the_weights_are_bitwise_those_of_the_source_and_what_is_stale_or_differs_touches_nothing(
    fresh_server, model_folders
):
    config = config_of(model_folders[0], verify_every=1)

    async def work(client: EngineClient, sink: Sink) -> None:
        before = (await client.weights_checksum())["per_engine_checksum"]
        staging = make_staging(config)
        stale = staging.fill(PolicyVersion(1), weights_of(model_folders[1]).items())
        staging.fill(PolicyVersion(2), weights_of(model_folders[1]).items())
        staged = staging.fill(PolicyVersion(3), weights_of(model_folders[1]).items())  # over the first one
        with pytest.raises(PublishError, match=r"rank 0, stale: .* holds content 2, announced was 1"):
            await publish(config, sink, stale)
        manifest = manifest_of(config, staged)
        staged.buckets[0].data[7] ^= 1  # a bit that turned on the way
        with pytest.raises(PublishError, match=r"rank 0, refused: bucket 0: checksum \w+, announced was \w+"):
            await sink.apply(staged.version, manifest)
        staged.buckets[0].data[7] ^= 1
        assert (await client.model_info()).weight_version == "0.0"
        (answer,) = await client.generate(PROMPTS[0], {"max_new_tokens": 4}, n=1)
        assert [span.version for span in answer.meta_info.weight_versions] == ["0.0"]
        assert (await client.weights_checksum())["per_engine_checksum"] == before

        await publish(config, sink, staged)
        through_memory = (await client.weights_checksum())["per_engine_checksum"]
        assert (await client.model_info()).weight_version == "3.0"
        await client.update_from_disk(str(model_folders[1]), "from-disk")
        assert through_memory == (await client.weights_checksum())["per_engine_checksum"] != before

    on_server(fresh_server.address, config, work)


def test_weights_that_do_not_fit_leave_the_server_waiting_for_a_version_that_does(fresh_server, model_folders):
    config = config_of(model_folders[0])
    wrong = {name: tensor[:1] if tensor.ndim > 1 else tensor for name, tensor in weights_of(model_folders[1]).items()}

    async def work(client: EngineClient, sink: Sink) -> Answer:
        staging = make_staging(config)
        with pytest.raises(PublishError, match="rank 0, failed: "):
            await publish(config, sink, staging.fill(PolicyVersion(1), wrong.items()))
        assert (await client.model_info()).weight_version == "1.0-partial"
        asking = asyncio.create_task(client.generate(PROMPTS[0], {"max_new_tokens": 4}, n=1))
        await asyncio.sleep(0.3)
        assert not asking.done()
        await publish(config, sink, staging.fill(PolicyVersion(2), weights_of(model_folders[1]).items()))
        (answer,) = await asking
        return answer

    answer = on_server(fresh_server.address, config, work)
    assert [span.version for span in answer.meta_info.weight_versions] == ["2.0"]


@pytest.mark.slow
def test_every_rank_of_a_tensor_parallel_server_loads_its_share(serving, model_folders, forward_logprobs, tmp_path):
    config = config_of(model_folders[0], verify_every=1)
    config = config.model_copy(update={"generate": config.generate.model_copy(update={"tensor_parallel": 2})})

    async def work(client: EngineClient, sink: Sink) -> Answer:
        staging = make_staging(config)
        staged = staging.fill(PolicyVersion(1), weights_of(model_folders[1]).items())
        await publish(config, sink, staged)
        (answer,) = await client.generate(PROMPTS[0], {"max_new_tokens": 40, "ignore_eos": True}, n=1)
        return answer

    with serving(config, tmp_path) as server:
        answer = on_server(server.address, config, work)
    assert [span.version for span in answer.meta_info.weight_versions] == ["1.0"]
    reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
    expected = forward_logprobs(weights_of(model_folders[1]), [*PROMPTS[0], *answer.output_ids])[len(PROMPTS[0]) - 1 :]
    assert (expected - reported).abs().max() < 1e-4


def test_memory_that_this_host_does_not_have_is_refused_before_the_server_is_touched(model_folders):
    config = config_of(model_folders[0])
    staging = make_staging(config)
    staged = staging.fill(PolicyVersion(1), weights_of(model_folders[1]).items())
    elsewhere = replace(staged, place=msgspec.structs.replace(staged.place, path="/proc/1/fd/99999"))

    async def work(client: EngineClient, sink: Sink) -> None:
        with pytest.raises(PublishError, match="memory needs learner, worker and servers on one host"):
            await publish(config, sink, elsewhere)

    on_server("http://127.0.0.1:1", config, work)


def test_an_attached_server_without_the_loader_is_refused_before_it_is_touched(model_folders):
    config = config_of(model_folders[0])
    staging = make_staging(config)
    staged = staging.fill(PolicyVersion(1), weights_of(model_folders[1]).items())
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({"custom_weight_loader": []})

    async def run() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}", TIMEOUT)
        with pytest.raises(PublishError, match="was started without --custom-weight-loader streamrl"):
            await publish(config, make_sink(config, client, RequestGate()), staged)
        await client.close()
        await runner.cleanup()

    asyncio.run(run())
    assert asked == ["/server_info"]


def test_a_server_that_accepts_and_never_answers_is_given_up_in_time(model_folders):
    config = config_of(model_folders[0], timeout=0.3)
    staging = make_staging(config)
    staged = staging.fill(PolicyVersion(1), weights_of(model_folders[1]).items())

    async def work(client: EngineClient, sink: Sink) -> None:
        with pytest.raises(PublishError, match=r"no answer: none in 0\.3 s"):
            await publish(config, sink, staged)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        on_server(f"http://127.0.0.1:{listener.getsockname()[1]}", config, work)


def test_verification_is_refused_where_nothing_would_be_compared():
    for transport in ("broadcast", "disk"):
        with pytest.raises(ConfigError, match=rf"verify_every: 5 is not used by transport={transport}"):
            load(None, [f"publish.transport={transport}", "publish.verify_every=5"])
    assert load(None, ["publish.transport=memory", "publish.verify_every=5"]).publish.verify_every == 5


def test_several_servers_at_once_are_refused_where_the_bytes_go_to_one_after_another():
    for transport in ("broadcast", "delta"):
        with pytest.raises(ConfigError, match=rf"at_once: 4 is not possible with transport={transport}"):
            load(None, [f"publish.transport={transport}", "publish.at_once=4"])
    assert load(None, ["publish.transport=memory", "publish.at_once=4"]).publish.at_once == 4


def test_every_nth_version_is_verified(model_folders):
    source, staging = MemorySource(3), Staging(1 << 16, DoubleMemory())
    weights = weights_of(model_folders[0])
    asked = [source.manifest(STATE, staging.fill(PolicyVersion(step), weights.items()))["verify"] for step in range(7)]
    assert asked == [True, False, False, True, False, False, True]


def test_only_a_version_that_is_verified_is_hashed(model_folders):
    source, staging = MemorySource(2), Staging(1 << 16, DoubleMemory())
    weights = weights_of(model_folders[0])
    for step in range(4):
        manifest = source.manifest(STATE, staging.fill(PolicyVersion(step), weights.items()))
        assert all(bool(bucket["checksum"]) is (step % 2 == 0) for bucket in manifest["buckets"])

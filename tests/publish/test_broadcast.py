"""Source, sink and a real SGLang server: what arrives, what is generated meanwhile, and what a failure leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient
from streamrl.engine.server import Server
from streamrl.generate.gate import RequestGate
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish.broadcast_source import BroadcastSource
from streamrl.publish.staging import Staged
from streamrl.publish.transport import Check, PublishError, Sink
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion
from tests.drawing import Drawing
from tests.publish.conftest import TIMEOUT, Backend

CONFIG = Config.model_validate({"publish": {"timeout": TIMEOUT}})
STATE = ServerState(name="server-0", version=PolicyVersion(0))
PROMPTS = [[1, 4, 2, 8], [3, 3, 5], [7, 1, 0, 2, 5, 8], [6, 8]]
TWICE = [prompt for prompt in PROMPTS for _ in range(2)]


def until(deadline: float) -> Check:
    """A check that gives up `deadline` seconds from now."""
    end = time.monotonic() + deadline

    def check() -> None:
        if time.monotonic() > end:
            raise PublishError("gave up")
        time.sleep(0.002)

    return check


async def publish(source: BroadcastSource, sink: Sink, staged: Staged) -> None:
    manifest = source.manifest(STATE, staged)
    sending = asyncio.to_thread(source.send, STATE, staged, until(TIMEOUT))
    await asyncio.gather(sending, sink.apply(staged.version, manifest))


def draw(client: EngineClient, tokens: int) -> list[Drawing]:
    """Two answers to each prompt."""
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    return [Drawing(client, prompt, sampling) for prompt in TWICE]


async def go_on(drawings: list[Drawing]) -> None:
    """Until the server has drawn further tokens of each."""
    await asyncio.gather(*(drawing.goes_on() for drawing in drawings))


def on_server(server: Server, backend: Backend, work: Callable, config: Config = CONFIG) -> object:
    async def run() -> object:
        client = EngineClient(server.address, TIMEOUT)
        source = backend.source()
        sink = make_sink(config, client, RequestGate())
        try:
            return await work(client, source, sink)
        finally:
            source.close()
            await client.close()

    return asyncio.run(run())


def check_spans(answers: list[Answer], prompts: list[list[int]], weights: dict[str, dict], forward: Callable) -> None:
    """Every span's log-probs are those of the weights of its version."""
    for answer, prompt in zip(answers, prompts, strict=True):
        reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
        for span in answer.meta_info.weight_versions:
            expected = forward(weights[span.version], [*prompt, *answer.output_ids])[len(prompt) - 1 :]
            assert (expected - reported)[span.start : span.end].abs().max() < 1e-4


def test_versions_arrive_while_requests_are_in_flight_and_every_token_is_of_its_versions_weights(
    backend: Backend, fresh_server, model_folders, forward_logprobs
):
    async def work(client, source, sink):
        drawings = draw(client, tokens=700)
        for step in (1, 2):
            staged = backend.staged(model_folders[step % 2], step)
            await go_on(drawings)
            await publish(source, sink, staged)
        return [await drawing.whole() for drawing in drawings], await client.model_info()

    answers, info = on_server(fresh_server, backend, work)
    assert info.weight_version == "2.0"
    assert len(answers) == 8
    assert all(len(answer.output_ids) == 700 for answer in answers)
    assert {answer.meta_info.finish_reason.type for answer in answers} == {"length"}
    for answer in answers:
        assert [span.version for span in answer.meta_info.weight_versions] == ["0.0", "1.0", "2.0"]
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    check_spans(answers, TWICE, {"0.0": weights[0], "1.0": weights[1], "2.0": weights[0]}, forward_logprobs)


def test_the_weights_that_arrive_are_bitwise_those_of_the_source(backend: Backend, fresh_server, model_folders):
    async def work(client, source, sink):
        before = await client.weights_checksum()
        await publish(source, sink, backend.staged(model_folders[1], 1))
        broadcast = await client.weights_checksum()
        await client.update_from_disk(str(model_folders[1]), "from-disk")
        return before, broadcast, await client.weights_checksum()

    before, broadcast, from_disk = on_server(fresh_server, backend, work)
    assert broadcast["per_engine_checksum"] == from_disk["per_engine_checksum"]
    assert broadcast["per_engine_checksum"] != before["per_engine_checksum"]


def test_a_transfer_that_breaks_off_lets_no_token_come_from_half_a_version(
    gloo: Backend, fresh_server, model_folders, forward_logprobs
):
    backend = gloo

    async def work(client, source, sink):
        drawings = draw(client, tokens=400)
        whole = backend.staged(model_folders[1], 1)
        await go_on(drawings)
        manifest = source.manifest(STATE, whole)
        receiving = asyncio.create_task(sink.apply(whole.version, manifest))
        first = Staged(whole.version, whole.buckets[:1])
        await asyncio.to_thread(source.send, STATE, first, until(TIMEOUT))
        source.drop(STATE.name)  # the source is gone
        with pytest.raises(PublishError, match="Failed to receive weights"):
            await receiving
        assert (await client.model_info()).weight_version == "1.0-partial"
        await asyncio.sleep(1.0)
        assert not any(drawing.is_whole for drawing in drawings)
        await publish(source, sink, backend.staged(model_folders[1], 2))
        return [await drawing.whole() for drawing in drawings]

    answers = on_server(fresh_server, backend, work)
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    for answer in answers:
        assert [span.version for span in answer.meta_info.weight_versions] == ["0.0", "2.0"]
    check_spans(answers, TWICE, {"0.0": weights[0], "2.0": weights[1]}, forward_logprobs)


def test_a_source_that_goes_before_it_sends_leaves_the_server_generating(gloo: Backend, fresh_server, model_folders):
    backend = gloo

    async def work(client, source, sink):
        await publish(source, sink, backend.staged(model_folders[1], 1))
        staged = backend.staged(model_folders[0], 2)
        manifest = source.manifest(STATE, staged)
        source.drop(STATE.name)
        with pytest.raises(PublishError):
            await sink.apply(staged.version, manifest)
        (answer,) = await client.generate(PROMPTS[0], {"max_new_tokens": 4}, n=1)
        return answer

    answer = on_server(fresh_server, backend, work)
    assert [span.version for span in answer.meta_info.weight_versions] == ["1.0"]


def test_a_source_that_is_gone_is_told_at_once_and_the_server_waits_for_nobody(
    backend: Backend, fresh_server, model_folders
):
    """A server that is asked to join a dead source waits for it inside the call, and generates nothing meanwhile."""

    async def work(client, source, sink):
        staged = backend.staged(model_folders[1], 1)
        manifest = source.manifest(STATE, staged)
        source.drop(STATE.name)
        with pytest.raises(PublishError, match="is gone"):
            await sink.apply(staged.version, manifest)
        assert not sink.stuck
        (answer,) = await client.generate(PROMPTS[0], {"max_new_tokens": 4}, n=1)
        return answer

    answer = on_server(fresh_server, backend, work)
    assert [span.version for span in answer.meta_info.weight_versions] == ["0.0"]


@pytest.mark.slow
def test_of_a_source_that_nccl_does_not_miss_the_server_is_stuck_and_only_its_restart_ends_that(
    lazy: Backend, serving, model_folders, tmp_path
):
    """The source is lost behind the first bucket; the server waits for the second one, for as long as it likes."""

    async def work(client, source, sink):
        whole = lazy.staged(model_folders[1], 1)
        manifest = source.manifest(STATE, whole)
        await asyncio.to_thread(source._rank_zero._await_idle, until(TIMEOUT))  # torch is imported
        receiving = asyncio.create_task(sink.apply(whole.version, manifest))
        assert whole.place is not None
        place = replace(whole.place, offsets=whole.place.offsets[:1], sizes=whole.place.sizes[:1])
        await asyncio.to_thread(source.send, STATE, Staged(whole.version, whole.buckets[:1], place), until(TIMEOUT))
        source.close()
        with pytest.raises(PublishError, match="none in 30 s"):
            await receiving
        return sink.stuck, sink.whole

    config = Config.model_validate({"model": {"path": model_folders[0]}, "publish": {"timeout": 30.0}})
    with serving(config, tmp_path) as server:
        assert on_server(server, lazy, work, config) == (True, False)

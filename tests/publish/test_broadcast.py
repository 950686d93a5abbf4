"""Source, sink and a real SGLang server: what arrives, what is generated meanwhile, and what a failure leaves."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.device import Device
from streamrl.engine.client import Answer, EngineClient
from streamrl.engine.server import Server
from streamrl.generate.gate import RequestGate
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish import broadcast_source
from streamrl.publish.broadcast_source import BroadcastSource
from streamrl.publish.staging import Staged, Staging
from streamrl.publish.transport import Check, PublishError, Sink
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

REPOSITORY = Path(__file__).parents[2]
TIMEOUT = 60.0
CONFIG = Config.model_validate({"publish": {"timeout": TIMEOUT}})
BUCKET = 1 << 16  # several buckets for the tiny model
STATE = ServerState(name="server-0", version=PolicyVersion(0))
PROMPTS = [[1, 4, 2, 8], [3, 3, 5], [7, 1, 0, 2, 5, 8], [6, 8]]


def until(deadline: float) -> Check:
    """A check that gives up `deadline` seconds from now."""
    end = time.monotonic() + deadline

    def check() -> None:
        if time.monotonic() > end:
            raise PublishError("gave up")
        time.sleep(0.002)

    return check


def staged_of(folder: Path, step: int) -> Staged:
    return Staging(BUCKET).fill(PolicyVersion(step), load_file(folder / "model.safetensors").items())


async def publish(source: BroadcastSource, sink: Sink, staged: Staged) -> None:
    manifest = source.manifest(STATE, staged)
    sending = asyncio.to_thread(source.send, STATE, staged, until(TIMEOUT))
    await asyncio.gather(sending, sink.apply(staged.version, manifest))


async def long_answers(client: EngineClient, tokens: int) -> list[asyncio.Task[list[Answer]]]:
    """Requests that are well under way."""
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    tasks = [asyncio.create_task(client.generate(prompt, sampling, n=2)) for prompt in PROMPTS]
    await asyncio.sleep(0.7)
    assert not any(task.done() for task in tasks)
    return tasks


def on_server(server: Server, work: Callable) -> object:
    async def run() -> object:
        client = EngineClient(server.address, TIMEOUT)
        source = BroadcastSource("127.0.0.1", Device("cpu", 0), TIMEOUT)
        sink = make_sink(CONFIG, client, RequestGate())
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
    fresh_server, model_folders, forward_logprobs
):
    async def work(client, source, sink):
        tasks = await long_answers(client, tokens=700)
        for step in (1, 2):
            await publish(source, sink, staged_of(model_folders[step % 2], step))
            await asyncio.sleep(0.3)
        answers = await asyncio.gather(*tasks)
        return [answer for pair in answers for answer in pair], await client.model_info()

    answers, info = on_server(fresh_server, work)
    assert info.weight_version == "2.0"
    assert len(answers) == 8
    assert all(len(answer.output_ids) == 700 for answer in answers)
    assert {answer.meta_info.finish_reason.type for answer in answers} == {"length"}
    for answer in answers:
        assert [span.version for span in answer.meta_info.weight_versions] == ["0.0", "1.0", "2.0"]
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    check_spans(answers, prompts, {"0.0": weights[0], "1.0": weights[1], "2.0": weights[0]}, forward_logprobs)


def test_the_weights_that_arrive_are_bitwise_those_of_the_source(fresh_server, model_folders):
    async def work(client, source, sink):
        before = await client.weights_checksum()
        await publish(source, sink, staged_of(model_folders[1], 1))
        broadcast = await client.weights_checksum()
        await client.update_from_disk(str(model_folders[1]), "from-disk")
        return before, broadcast, await client.weights_checksum()

    before, broadcast, from_disk = on_server(fresh_server, work)
    assert broadcast["per_engine_checksum"] == from_disk["per_engine_checksum"]
    assert broadcast["per_engine_checksum"] != before["per_engine_checksum"]


def test_a_transfer_that_breaks_off_lets_no_token_come_from_half_a_version(
    fresh_server, model_folders, forward_logprobs
):
    async def work(client, source, sink):
        tasks = await long_answers(client, tokens=400)
        whole = staged_of(model_folders[1], 1)
        manifest = source.manifest(STATE, whole)
        receiving = asyncio.create_task(sink.apply(whole.version, manifest))
        first = Staged(whole.version, whole.buckets[:1])
        await asyncio.to_thread(source.send, STATE, first, until(TIMEOUT))
        source.drop(STATE.name)  # the source is gone
        with pytest.raises(PublishError, match="Failed to receive weights"):
            await receiving
        assert (await client.model_info()).weight_version == "1.0-partial"
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in tasks)
        await publish(source, sink, staged_of(model_folders[1], 2))
        answers = await asyncio.gather(*tasks)
        return [answer for pair in answers for answer in pair]

    answers = on_server(fresh_server, work)
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    for answer in answers:
        assert [span.version for span in answer.meta_info.weight_versions] == ["0.0", "2.0"]
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    check_spans(answers, prompts, {"0.0": weights[0], "2.0": weights[1]}, forward_logprobs)


def test_a_source_that_goes_before_it_sends_leaves_the_server_generating(fresh_server, model_folders):
    async def work(client, source, sink):
        await publish(source, sink, staged_of(model_folders[1], 1))
        staged = staged_of(model_folders[0], 2)
        manifest = source.manifest(STATE, staged)
        source.drop(STATE.name)
        with pytest.raises(PublishError):
            await sink.apply(staged.version, manifest)
        (answer,) = await client.generate(PROMPTS[0], {"max_new_tokens": 4}, n=1)
        return answer

    answer = on_server(fresh_server, work)
    assert [span.version for span in answer.meta_info.weight_versions] == ["1.0"]


def test_a_server_that_never_comes_costs_the_source_no_longer_than_it_waits(model_folders):
    source = BroadcastSource("127.0.0.1", Device("cpu", 0), TIMEOUT)
    staged = staged_of(model_folders[0], 1)
    source.manifest(STATE, staged)
    with pytest.raises(PublishError, match="gave up"):
        source.send(STATE, staged, until(0.2))
    source.close()


class Sending:
    """A copy to the device that tells when it is asked for what; nothing reaches the device outside of `sending`."""

    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.inside = False

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def into(self, data: torch.Tensor) -> torch.Tensor:
        assert self.inside
        self.told.append(f"into {len(data)}")
        return data


class Broadcast:
    def __init__(self, told: list[str], data: torch.Tensor) -> None:
        self.told = told
        self.size = len(data)

    def is_completed(self) -> bool:
        self.told.append(f"completed {self.size}")
        return True

    def wait(self) -> None: ...


def test_a_bucket_comes_to_the_device_while_the_one_before_it_goes_out(monkeypatch):
    told: list[str] = []
    staged = Staging(8).fill(PolicyVersion(1), [(f"w{size}", torch.zeros(size)) for size in (2, 3, 4)])
    source = BroadcastSource("127.0.0.1", Device("cpu", 0), TIMEOUT)
    source._copying = Sending(told)

    def begin(members: object, data: torch.Tensor) -> Broadcast:
        assert source._copying.inside  # it waits for this stream, not for what the learner computes
        told.append(f"broadcast {len(data)}")
        return Broadcast(told, data)

    monkeypatch.setattr(broadcast_source, "_begin", begin)
    monkeypatch.setattr(broadcast_source, "_join", lambda *_: object())
    monkeypatch.setattr(broadcast_source, "_await_member", lambda *_: None)
    monkeypatch.setattr(broadcast_source, "_leave", lambda *_: None)
    source.manifest(STATE, staged)
    source.send(STATE, staged, until(TIMEOUT))
    source.close()
    assert told == [
        "into 8", "broadcast 8", "into 12", "completed 8", "broadcast 12", "into 16", "completed 12",
        "broadcast 16", "completed 16", "completed 16",
    ]  # fmt: skip


def test_a_server_that_falls_silent_holds_nobody_and_may_still_receive_what_it_was_sent(model_folders, tmp_path):
    source, staging = BroadcastSource("127.0.0.1", Device("cpu", 0), TIMEOUT), Staging(1 << 30)
    staged = staging.fill(PolicyVersion(1), load_file(model_folders[0] / "model.safetensors").items())
    plan, (layout,) = source.manifest(STATE, staged), staged.layouts(checksums=True)
    words = [plan["group"], plan["port"], layout.bytes, tmp_path]
    command = [sys.executable, "-m", "tests.publish.silent_server", *map(str, words)]
    server = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    patience = until(TIMEOUT)

    def check() -> None:
        patience()
        if (tmp_path / "joined").exists():
            raise PublishError("fell silent")

    try:
        with pytest.raises(PublishError, match="fell silent"):
            source.send(STATE, staged, check)
        source.drop(STATE.name)
        (left,) = [thread for thread in threading.enumerate() if thread.name == "left"]
        assert left.is_alive()  # waits for the end of the broadcast, so that nobody else has to
        assert source.reads_on()
        staging.leave()
        staging.fill(PolicyVersion(2), load_file(model_folders[1] / "model.safetensors").items())
        (tmp_path / "go").touch()
        told, _ = server.communicate(timeout=TIMEOUT)
    finally:
        server.kill()
        server.wait(TIMEOUT)
    assert told.strip() == layout.checksum
    left.join(TIMEOUT)
    assert not left.is_alive()
    assert not source.reads_on()


def test_a_source_that_is_gone_is_told_at_once_and_the_server_waits_for_nobody(fresh_server, model_folders):
    """A server that is asked to join a dead source waits for it inside the call, and generates nothing meanwhile."""

    async def work(client, source, sink):
        staged = staged_of(model_folders[1], 1)
        manifest = source.manifest(STATE, staged)
        source.drop(STATE.name)
        with pytest.raises(PublishError, match="is gone"):
            await sink.apply(staged.version, manifest)
        assert not sink.stuck
        (answer,) = await client.generate(PROMPTS[0], {"max_new_tokens": 4}, n=1)
        return answer

    answer = on_server(fresh_server, work)
    assert [span.version for span in answer.meta_info.weight_versions] == ["0.0"]

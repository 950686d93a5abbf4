"""Changed weights: what travels, what a broken chain leads to, and what a real SGLang server makes of them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.config.replay import StreamConfig
from streamrl.engine.client import EngineClient
from streamrl.engine.kept_memory import KeptReader, Place
from streamrl.engine.load_plan import BucketLayout
from streamrl.generate.gate import RequestGate
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish import delta_sink
from streamrl.publish.delta_sink import DeltaSink
from streamrl.publish.delta_source import DeltaSource
from streamrl.publish.sources import make_source
from streamrl.publish.staging import Staged, Staging
from streamrl.publish.transport import Check, PublishError, Sink
from streamrl.replay.listening import listen
from streamrl.stream.keys import key_folder, service_keys
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

TIMEOUT = 60.0
STATE = ServerState(name="server-0", version=PolicyVersion(0))
SIZE = 200_000  # weights
PROMPT = [7, 1, 0, 2, 5, 8]


@dataclass
class Loaded:
    """What a server would load: the last place, read as its loader reads it."""

    contents: list[bytes] = field(default_factory=list)
    reader: KeptReader = field(default_factory=KeptReader)

    async def load(self, version: PolicyVersion, place: Place, buckets: Sequence[BucketLayout], verify: bool) -> None:
        with self.reader.reading(place) as content:
            self.contents = [data.tobytes() for data in content]


def until(deadline: float) -> Check:
    end = time.monotonic() + deadline

    def check() -> None:
        if time.monotonic() > end:
            raise PublishError("gave up")

    return check


def once(event: threading.Event) -> Check:
    def check() -> None:
        if event.is_set():
            raise PublishError("gave up")

    return check


@pytest.fixture
def source(tmp_path) -> Iterator[DeltaSource]:
    source = DeltaSource("127.0.0.1", StreamConfig(curve="off"), tmp_path, verify_every=0)
    yield source
    source.close()


def sink_of(loaded: Loaded, **settings: object) -> DeltaSink:
    return DeltaSink(loaded, StreamConfig(curve="off", **settings), None, TIMEOUT)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(SIZE, generator=generator).bfloat16() for name in ("a", "b")}


def step(tensors: dict[str, torch.Tensor], share: float) -> None:
    """Change so large a share of them, as an optimizer does: a little."""
    for tensor in tensors.values():
        tensor[torch.rand(SIZE) < share] *= 1.1


async def publish(source: DeltaSource, sink: Sink, staged: Staged) -> int:
    """Bytes that went over the socket."""
    before = source.parcels.sent
    manifest = source.manifest(STATE, staged)
    sending = asyncio.to_thread(source.send, STATE, staged, until(TIMEOUT))
    await asyncio.gather(sending, sink.apply(staged.version, manifest))
    return source.parcels.sent - before


def bytes_of(staged: Staged) -> list[bytes]:
    return [bucket.data.numpy().tobytes() for bucket in staged.buckets]


def test_the_first_version_comes_whole_and_later_ones_as_what_changed(source):
    tensors, staging, loaded = weights(), Staging(SIZE * 2), Loaded()
    whole = 2 * 2 * SIZE

    async def run() -> None:
        sink = sink_of(loaded)
        for number in range(4):
            staged = staging.fill(PolicyVersion(number), tensors.items())
            sent = await publish(source, sink, staged)
            assert loaded.contents == bytes_of(staged)
            assert sent == whole if number == 0 else sent < whole / 20
            step(tensors, 0.03)

    asyncio.run(run())


def test_a_server_that_missed_versions_follows_the_chain_and_one_from_before_it_gets_the_whole(source):
    tensors, staging = weights(), Staging(SIZE * 2)
    whole = 2 * 2 * SIZE
    near, far, new = Loaded(), Loaded(), Loaded()

    async def run() -> None:
        behind, before, fresh = sink_of(near), sink_of(far), sink_of(new)
        for number in range(14):
            staged = staging.fill(PolicyVersion(number), tensors.items())
            if number == 0:
                await publish(source, before, staged)
            elif number == 9:
                await publish(source, behind, staged)
            else:
                source.manifest(STATE, staged)  # to others
            step(tensors, 0.001)
        assert await publish(source, behind, staged) < whole / 20
        assert await publish(source, before, staged) == whole
        assert await publish(source, fresh, staged) == whole
        assert await publish(source, fresh, staged) == 0  # tried again: it is there
        assert near.contents == far.contents == new.contents == bytes_of(staged)

    asyncio.run(run())


def test_a_broken_chain_is_noticed_by_the_checksums_and_the_whole_version_fetched_at_once(source):
    tensors, staging, loaded = weights(), Staging(SIZE * 2), Loaded()

    async def run() -> None:
        sink = sink_of(loaded)
        await publish(source, sink, staging.fill(PolicyVersion(0), tensors.items()))
        first = next(iter(tensors.values()))
        former = first.clone()
        step(tensors, 0.01)
        unchanged = int((first == former).nonzero()[0])
        sink._arrays[0][2 * unchanged] ^= 1  # of two bytes a weight: the kept version is not what it is taken for
        staged = staging.fill(PolicyVersion(1), tensors.items())
        assert await publish(source, sink, staged) > 2 * 2 * SIZE
        assert loaded.contents == bytes_of(staged)
        step(tensors, 0.01)
        staged = staging.fill(PolicyVersion(2), tensors.items())
        assert await publish(source, sink, staged) < SIZE / 5
        assert loaded.contents == bytes_of(staged)

    asyncio.run(run())


def test_what_changed_too_much_or_changed_its_shape_comes_whole(source):
    tensors, staging, loaded = weights(), Staging(SIZE * 2), Loaded()

    async def run() -> None:
        sink = sink_of(loaded)
        await publish(source, sink, staging.fill(PolicyVersion(0), tensors.items()))
        staged = staging.fill(PolicyVersion(1), weights(1).items())
        assert await publish(source, sink, staged) == 2 * 2 * SIZE
        staged = staging.fill(PolicyVersion(2), [("a", torch.ones(50, 3)), ("c", torch.ones(7).bfloat16())])
        assert await publish(source, sink, staged) == 614
        assert loaded.contents == bytes_of(staged)

    asyncio.run(run())


def test_a_worker_that_goes_in_the_middle_holds_nobody_and_the_next_one_gets_the_version(source):
    tensors, staging, loaded = weights(), Staging(SIZE * 2), Loaded()
    staged = staging.fill(PolicyVersion(1), tensors.items())

    async def run() -> None:
        manifest = source.manifest(STATE, staged)
        with pytest.raises(PublishError, match="gave up"):  # nobody asks
            await asyncio.to_thread(source.send, STATE, staged, until(0.1))
        leaving = asyncio.create_task(sink_of(Loaded()).apply(staged.version, manifest))
        await asyncio.sleep(0.1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await publish(source, sink_of(loaded), staged)

    asyncio.run(run())
    assert loaded.contents == bytes_of(staged)


def test_a_hung_loader_keeps_its_version_and_the_next_one_goes_elsewhere(source):
    tensors, staging, loaded = weights(), Staging(SIZE * 2), Loaded()

    async def run() -> None:
        sink = sink_of(loaded)
        first = staging.fill(PolicyVersion(1), tensors.items())
        await publish(source, sink, first)
        expected, hung = bytes_of(first), KeptReader()
        assert sink._place is not None
        with hung.reading(sink._place) as held:
            step(tensors, 0.01)
            second = staging.fill(PolicyVersion(2), tensors.items())
            await publish(source, sink, second)
            assert [data.tobytes() for data in held] == expected
        assert loaded.contents == bytes_of(second)

    asyncio.run(run())


def test_a_change_that_outlives_its_try_leaves_the_next_version_alone(source, monkeypatch):
    tensors, staging, loaded = weights(), Staging(SIZE * 2), Loaded()
    plain, begun, released, changed = delta_sink.apply, threading.Event(), threading.Event(), threading.Semaphore(0)

    def wait_and_apply(target: np.ndarray, delta: memoryview) -> None:
        begun.set()
        assert released.wait(TIMEOUT)
        plain(target, delta)
        changed.release()

    async def run() -> None:
        sink = sink_of(loaded)
        await publish(source, sink, staging.fill(PolicyVersion(0), tensors.items()))
        step(tensors, 0.01)
        monkeypatch.setattr(delta_sink, "apply", wait_and_apply)
        staged = staging.fill(PolicyVersion(1), tensors.items())
        leaving = asyncio.create_task(sink.apply(staged.version, source.manifest(STATE, staged)))
        with pytest.raises(PublishError, match="gave up"):
            await asyncio.to_thread(source.send, STATE, staged, once(begun))
        leaving.cancel()  # as its timeout does
        with pytest.raises(asyncio.CancelledError):
            await leaving
        step(tensors, 0.01)
        staged = staging.fill(PolicyVersion(2), tensors.items())
        assert await publish(source, sink, staged) == 2 * 2 * SIZE
        released.set()
        for _ in staged.buckets:
            assert await asyncio.to_thread(changed.acquire, timeout=TIMEOUT)
        assert [array.tobytes() for array in sink._arrays] == loaded.contents == bytes_of(staged)

    asyncio.run(run())


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), MemoryError("no memory")])
def test_a_worker_without_room_costs_an_attempt_and_not_the_worker(error, source, monkeypatch):
    tensors, staging, loaded = weights(), Staging(SIZE * 2), Loaded()

    refused = threading.Event()

    def refuse(*_: object) -> None:
        refused.set()
        raise error

    async def run() -> None:
        sink = sink_of(loaded)
        first = staging.fill(PolicyVersion(1), tensors.items())
        await publish(source, sink, first)
        assert sink._place is not None
        step(tensors, 0.01)
        second = staging.fill(PolicyVersion(2), tensors.items())
        with monkeypatch.context() as full, KeptReader().reading(sink._place):  # so that it needs new memory
            full.setattr(delta_sink, "KeptMemory", refuse)
            failing = asyncio.create_task(sink.apply(second.version, source.manifest(STATE, second)))
            with pytest.raises(PublishError, match="gave up"):
                await asyncio.to_thread(source.send, STATE, second, once(refused))
            with pytest.raises(PublishError, match=r"Too many open files|no memory"):
                await failing
        await publish(source, sink, second)
        assert loaded.contents == bytes_of(second)

    asyncio.run(run())


def test_a_socket_that_nobody_guards_is_replaced(source):
    tensors, staging, loaded = weights(), Staging(SIZE * 2), Loaded()

    async def run() -> None:
        sink = sink_of(loaded)
        staged = staging.fill(PolicyVersion(1), tensors.items())
        former = source.parcels
        former._door._failure = RuntimeError("counts that cannot be")
        with pytest.raises(PublishError, match="counts that cannot be"):
            source.send(STATE, staged, until(TIMEOUT))
        assert former.is_closed
        await publish(source, sink, staged)
        assert loaded.contents == bytes_of(staged)

    asyncio.run(run())


def test_a_run_whose_service_listens_at_a_file_has_the_keys_for_its_weights(tmp_path):
    config = Config.model_validate(
        {
            "model": {"path": tmp_path},
            "publish": {"transport": "delta"},
            "replay": {"address": f"ipc://{tmp_path}/replay"},
        }
    )
    loaded, staged = Loaded(), Staging(SIZE * 2).fill(PolicyVersion(1), weights().items())
    router = listen(config, tmp_path)
    source = make_source(config, tmp_path, router.address)
    try:
        assert isinstance(source, DeltaSource)
        sink = DeltaSink(loaded, config.stream, key_folder(config, tmp_path), TIMEOUT)
        asyncio.run(publish(source, sink, staged))
        assert loaded.contents == bytes_of(staged)
        assert source.parcels.public_key
    finally:
        source.close()
        router.close()


def test_beyond_this_host_only_the_runs_key_comes_in(tmp_path):
    service_keys(tmp_path / "run")
    service_keys(tmp_path / "other")
    stream = StreamConfig(curve="on")
    source = DeltaSource("127.0.0.1", stream, tmp_path / "run", verify_every=0)
    staged = Staging(SIZE * 2).fill(PolicyVersion(1), weights().items())
    loaded = Loaded()

    async def run() -> None:
        await publish(source, DeltaSink(loaded, stream, tmp_path / "run", TIMEOUT), staged)
        manifest = source.manifest(STATE, staged)
        with pytest.raises(PublishError, match=r"did not arrive from tcp.* in publish\.timeout=0\.5 s"):
            await DeltaSink(loaded, stream, tmp_path / "other", 0.5).apply(staged.version, manifest)
        with pytest.raises(PublishError, match=r"client\.key is missing"):
            await DeltaSink(loaded, stream, tmp_path / "none", 0.5).apply(staged.version, manifest)

    asyncio.run(run())
    source.close()
    assert loaded.contents == bytes_of(staged)


def test_a_real_server_generates_with_the_weights_that_changed(
    fresh_server, model_folders, forward_logprobs: Callable[..., torch.Tensor], tmp_path: Path
):
    publish_settings = {"transport": "delta", "timeout": TIMEOUT, "bucket": 1 << 16, "verify_every": 1}
    config = Config.model_validate(
        {"model": {"path": model_folders[0]}, "publish": publish_settings, "stream": {"curve": "off"}}
    )
    tensors = load_file(model_folders[1] / "model.safetensors")

    async def run() -> None:
        client = EngineClient(fresh_server.address, TIMEOUT)
        source = make_source(config, tmp_path, "tcp://127.0.0.1:1")
        sink = make_sink(config, client, RequestGate())
        staging = Staging(config.publish.bucket)
        try:
            assert isinstance(source, DeltaSource)
            for number in (1, 2, 3):
                staged = staging.fill(PolicyVersion(number), tensors.items())
                sent = await publish(source, sink, staged)
                assert (sent < sum(bucket.layout.bytes for bucket in staged.buckets) / 5) == (number > 1)
                (answer,) = await client.generate(PROMPT, {"max_new_tokens": 40, "ignore_eos": True}, n=1)
                assert [span.version for span in answer.meta_info.weight_versions] == [f"{number}.0"]
                reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
                expected = forward_logprobs(tensors, [*PROMPT, *answer.output_ids])[len(PROMPT) - 1 :]
                assert (expected - reported).abs().max() < 1e-4
                random = np.random.default_rng(number)
                for tensor in tensors.values():
                    tensor[torch.from_numpy(random.random(tensor.shape) < 0.03)] *= 1.5
        finally:
            source.close()
            await client.close()

    asyncio.run(run())

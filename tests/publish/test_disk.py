"""Weights through a folder: what is written, what is refused, and what a real SGLang server makes of it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from streamrl.config import Config
from streamrl.config.file import ConfigError, load
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient
from streamrl.engine.server import Server
from streamrl.generate.gate import RequestGate
from streamrl.generate.served import ServedModel
from streamrl.generate.weight_sinks import make_sink
from streamrl.publish.disk_source import DiskSource
from streamrl.publish.sources import make_source
from streamrl.publish.staging import Staged, Staging
from streamrl.publish.transport import PublishError, Sink
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion
from tests.drawing import Drawing
from tests.operations_table import documented

TIMEOUT = 60.0
STATE = ServerState(name="server-0", version=PolicyVersion(0))
PROMPTS = [[1, 4, 2, 8], [3, 3, 5], [7, 1, 0, 2, 5, 8], [6, 8]]


@pytest.fixture
def config(model_folders: tuple[Path, Path]) -> Config:
    return Config.model_validate(
        {"model": {"path": model_folders[0]}, "publish": {"transport": "disk", "timeout": TIMEOUT}}
    )


def staged_of(folder: Path, step: int, incarnation: int = 0) -> Staged:
    weights = load_file(folder / "model.safetensors")
    return Staging(1 << 16).fill(PolicyVersion(step, incarnation), weights.items())


def on_server(server: Server, config: Config, work: Callable) -> object:
    async def run() -> object:
        client = EngineClient(server.address, TIMEOUT)
        try:
            return await work(client, make_sink(config, client, RequestGate()))
        finally:
            await client.close()

    return asyncio.run(run())


async def publish(source: DiskSource, sink: Sink, staged: Staged) -> Path:
    manifest = source.manifest(STATE, staged)
    await sink.apply(staged.version, manifest)
    return Path(manifest["folder"])


def test_a_version_is_a_whole_hugging_face_folder_and_the_two_written_last_are_kept(model_folders, config, tmp_path):
    source = make_source(config, tmp_path, "tcp://127.0.0.1:1")
    for step, incarnation in ((8, 0), (9, 0), (10, 0), (7, 1)):  # the last after a return to a checkpoint
        manifest = source.manifest(STATE, staged_of(model_folders[1], step, incarnation))
        assert source.manifest(STATE, staged_of(model_folders[1], step, incarnation)) == manifest  # for another server
    folder = tmp_path / "published"
    assert sorted(path.name for path in folder.iterdir()) == ["10.0", "7.1"]
    stored, expected = (
        load_file(folder / "7.1" / "model.safetensors"),
        load_file(model_folders[1] / "model.safetensors"),
    )
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert (folder / "7.1" / "config.json").read_bytes() == (model_folders[0] / "config.json").read_bytes()


def test_a_version_that_cannot_be_written_whole_is_told_and_leaves_nothing(model_folders, config, tmp_path):
    root = tmp_path / "published"
    source = DiskSource(root, tmp_path / "no model")
    with pytest.raises(PublishError, match=r"version 1\.0 was not written"):
        source.manifest(STATE, staged_of(model_folders[1], 1))
    assert list(root.iterdir()) == []
    killed = root / f".1.0.{os.getpid() + 1}"
    killed.mkdir()
    source = DiskSource(root, model_folders[0])
    source.manifest(STATE, staged_of(model_folders[1], 1))
    assert [path.name for path in root.iterdir()] == ["1.0"]


def test_the_folder_is_the_runs_own_below_the_configured_one_and_refused_without_the_transport(model_folders, tmp_path):
    path = f"publish.folder={tmp_path / 'shared'}"
    config = load(None, ["run.name=seven", "publish.transport=disk", path])
    source = make_source(config, tmp_path, "tcp://127.0.0.1:1")
    source._model = model_folders[0]
    manifest = source.manifest(STATE, staged_of(model_folders[1], 1))
    assert Path(manifest["folder"]) == tmp_path / "shared" / "seven" / "1.0"
    with pytest.raises(ConfigError, match=r"publish\.folder: .* is not used by transport=broadcast; allowed: null"):
        load(None, [path])


def test_two_runs_of_one_name_do_not_publish_into_one_folder(tmp_path):
    config = load(None, ["publish.transport=disk", f"publish.folder={tmp_path / 'shared'}"])
    first = make_source(config, tmp_path / "a", "tcp://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"shared/run") as refused:
        make_source(config, tmp_path / "b", "tcp://127.0.0.1:1")
    documented(
        "publish.folder: ... has the versions of another run, which is under way; allowed: ...", str(refused.value), 2
    )
    first.close()
    make_source(config, tmp_path / "b", "tcp://127.0.0.1:1").close()


def test_versions_arrive_while_requests_are_in_flight_and_every_token_is_of_its_versions_weights(
    fresh_server, model_folders, config, forward_logprobs, tmp_path
):
    async def work(client: EngineClient, sink: Sink) -> list[Answer]:
        source = make_source(config, tmp_path, "tcp://127.0.0.1:1")
        sampling = {"temperature": 1.0, "max_new_tokens": 500, "ignore_eos": True}
        drawings = [Drawing(client, prompt, sampling) for prompt in PROMPTS]
        for step in (1, 2):
            staged = staged_of(model_folders[step % 2], step)
            await asyncio.gather(*(drawing.goes_on() for drawing in drawings))
            await publish(source, sink, staged)
        assert (await client.model_info()).weight_version == "2.0"
        return [await drawing.whole() for drawing in drawings]

    answers = on_server(fresh_server, config, work)
    weights = [load_file(folder / "model.safetensors") for folder in model_folders]
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        assert (len(answer.output_ids), answer.meta_info.finish_reason.type) == (500, "length")
        assert [span.version for span in answer.meta_info.weight_versions] == ["0.0", "1.0", "2.0"]
        reported = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
        for span, of in zip(answer.meta_info.weight_versions, (0, 1, 0), strict=True):
            expected = forward_logprobs(weights[of], [*prompt, *answer.output_ids])[len(prompt) - 1 :]
            assert (expected - reported)[span.start : span.end].abs().max() < 1e-4


def test_a_folder_that_is_torn_or_missing_leaves_the_server_generating_with_the_old_weights(
    fresh_server, model_folders, config, tmp_path
):
    async def work(client: EngineClient, sink: Sink) -> tuple[dict, dict]:
        before = await client.weights_checksum()
        source = make_source(config, tmp_path, "tcp://127.0.0.1:1")
        staged = staged_of(model_folders[1], 1)
        manifest = source.manifest(STATE, staged)
        file = Path(manifest["folder"]) / "model.safetensors"
        os.truncate(file, file.stat().st_size - 1)
        with pytest.raises(PublishError, match=r"model\.safetensors: checksum \w+, announced was"):
            await sink.apply(staged.version, manifest)
        shutil.rmtree(file.parent)
        with pytest.raises(PublishError, match=r"must see publish\.folder under one path"):
            await sink.apply(staged.version, manifest)
        (answer,) = await client.generate(PROMPTS[0], {"max_new_tokens": 4}, n=1)
        assert [span.version for span in answer.meta_info.weight_versions] == ["0.0"]
        return before, await client.weights_checksum()

    before, after = on_server(fresh_server, config, work)
    assert after["per_engine_checksum"] == before["per_engine_checksum"]


def test_a_worker_that_attaches_to_a_server_with_a_published_version_finds_the_initial_weights_again(
    fresh_server, model_folders, config, tmp_path
):
    async def work(client: EngineClient, sink: Sink) -> tuple[dict, dict]:
        before = await client.weights_checksum()
        folder = await publish(make_source(config, tmp_path, "tcp://127.0.0.1:1"), sink, staged_of(model_folders[1], 1))
        assert (await client.weights_checksum())["per_engine_checksum"] != before["per_engine_checksum"]
        shutil.rmtree(folder)  # by a later run
        attached = config.model_copy(
            update={"generate": config.generate.model_copy(update={"attach": (fresh_server.address,)})}
        )
        served = ServedModel(attached, tmp_path, index=0)
        await served.start()
        await served.close()
        assert (await client.model_info()).weight_version == "0.0"
        return before, await client.weights_checksum()

    before, after = on_server(fresh_server, config, work)
    assert after["per_engine_checksum"] == before["per_engine_checksum"]

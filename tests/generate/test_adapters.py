"""Adapters on a real server: each version's tokens are its own, old ones go when nobody uses them any more."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_models import random_adapter
from streamrl.config import Config
from streamrl.engine.answers import Answer
from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.server import Server, server_arguments
from streamrl.generate.adapters import Adapters
from streamrl.generate.served import ServedModel
from streamrl.publish.adapter_source import AdapterSource
from streamrl.publish.staging import Staged, Staging
from streamrl.publish.transport import PublishError
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion
from tests.drawing import Drawing

START_TIMEOUT = 200.0  # seconds
PROMPT = [1, 4, 2, 7]
V1, V2, V3 = PolicyVersion(1), PolicyVersion(2), PolicyVersion(3)
LORA = {"rank": 4, "alpha": 8, "publish": "adapter"}


def config_of(model: Path, attach: str | None = None) -> Config:
    generate = {"attach": [attach]} if attach else {}
    return Config.model_validate({"model": {"path": model}, "learner": {"lora": LORA}, "generate": generate})


def merged(weights: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + alpha / r * B A, written out."""
    result = dict(weights)
    for name, a in adapter.items():
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            result[target] = result[target] + 8 / 4 * adapter[name.replace("lora_A", "lora_B")] @ a
    return result


@pytest.fixture(scope="module")
def server(
    model_folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, serving: Callable[..., Any]
) -> Iterator[Server]:
    """A server that takes adapters in."""
    with serving(config_of(model_folders[0]), tmp_path_factory.mktemp("engine")) as running:
        yield running


class Learner:
    """What publishes adapters, and the weights that each version amounts to."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = config.model.path
        self.base = load_file(self.folder / "model.safetensors")
        self.source = AdapterSource(folder, config.learner.lora, config.model.path)
        self.staging = Staging(1 << 20)

    def manifest(self, version: PolicyVersion) -> dict:
        staged: Staged = self.staging.fill(version, self.adapter(version).items())
        return self.source.manifest(ServerState(name="server-0", version=PolicyVersion(0)), staged)

    def weights(self, version: PolicyVersion) -> dict[str, torch.Tensor]:
        return merged(self.base, self.adapter(version)) if version.step else self.base

    def adapter(self, version: PolicyVersion) -> dict[str, torch.Tensor]:
        """Large enough that versions differ at any token, and no larger: rounding grows with the logits."""
        return random_adapter(self.folder, seed=version.step, size=0.15)


def on_server(
    server: Server, model: Path, folder: Path, job: Callable[[ServedModel, Learner], Awaitable[None]]
) -> None:
    """Run `job` with the server, as a worker has it, and a learner."""
    config = config_of(model, server.address)

    async def run() -> None:
        served = ServedModel(config, folder, 0)
        try:
            await served.start()
            await job(served, Learner(config, folder))
        finally:
            await served.close()

    asyncio.run(run())


async def ask(served: ServedModel, tokens: int, n: int = 3) -> list[Answer]:
    sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    return await served.policy.generate(PROMPT, sampling, n)


def assert_exact(answers: list[Answer], version: PolicyVersion, learner: Learner, forward: Callable) -> None:
    """Every token is stamped with `version`, and has the log-prob of its weights to 1e-4."""
    assert answers
    for answer in answers:
        (span,) = answer.meta_info.weight_versions
        assert (span.version, span.start, span.end) == (str(version), 0, len(answer.output_ids))
        expected = forward(learner.weights(version), PROMPT + answer.output_ids)[len(PROMPT) - 1 :]
        given = torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
        assert (given - expected).abs().max() < 1e-4


@pytest.mark.slow
def test_an_adapter_on_a_server_gives_the_log_probs_of_the_merged_weights(
    server: Server, model_folders: tuple[Path, Path], tmp_path: Path, forward_logprobs: Callable
) -> None:
    async def job(served: ServedModel, learner: Learner) -> None:
        assert_exact(await ask(served, 24), PolicyVersion(0), learner, forward_logprobs)
        sink = served.sink()
        for version in (V1, V2):
            await sink.apply(version, learner.manifest(version))
            assert_exact(await ask(served, 24), version, learner, forward_logprobs)

    on_server(server, model_folders[0], tmp_path, job)


def test_a_server_with_the_adapter_and_one_with_the_merged_weights_give_the_same_answer(
    server: Server, fresh_server: Server, model_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    greedy = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}

    async def job(served: ServedModel, learner: Learner) -> None:
        await served.sink().apply(V1, learner.manifest(V1))
        (by_adapter,) = await served.policy.generate(PROMPT, greedy, 1)
        folder = shutil.copytree(model_folders[0], tmp_path / "merged")
        save_file(learner.weights(V1), folder / "model.safetensors", metadata={"format": "pt"})
        client = EngineClient(fresh_server.address, timeout=60)
        try:
            await client.update_from_disk(str(folder), "1.0")
            (whole,) = await client.generate(PROMPT, greedy, 1)
        finally:
            await client.close()
        assert by_adapter.output_ids == whole.output_ids
        first, second = (
            torch.tensor([entry[0] for entry in answer.meta_info.output_token_logprobs])
            for answer in (by_adapter, whole)
        )
        assert (first - second).abs().max() < 1e-4

    on_server(server, model_folders[0], tmp_path, job)


def test_a_request_keeps_its_adapter_to_its_end_and_an_idle_adapter_is_unloaded(
    server: Server, model_folders: tuple[Path, Path], tmp_path: Path, forward_logprobs: Callable
) -> None:
    async def job(served: ServedModel, learner: Learner) -> None:
        sink = served.sink()
        await sink.apply(V1, learner.manifest(V1))
        following = learner.manifest(V2)
        long = Drawing(served.policy, PROMPT, {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}, V1)
        await long.goes_on()
        await sink.apply(V2, following)
        assert not long.is_whole, "nothing was in flight"
        assert_exact(await ask(served, 24), V2, learner, forward_logprobs)
        assert_exact([await long.whole()], V1, learner, forward_logprobs)
        await sink.apply(V3, learner.manifest(V3))
        with pytest.raises(EngineError, match="does not exist"):
            await served.client.unload_adapter(str(V1), 30)
        assert_exact(await ask(served, 24), V3, learner, forward_logprobs)

    on_server(server, model_folders[0], tmp_path, job)


def test_an_adapter_that_is_not_what_the_learner_wrote_is_refused_and_the_former_one_stays(
    server: Server, model_folders: tuple[Path, Path], tmp_path: Path, forward_logprobs: Callable
) -> None:
    async def job(served: ServedModel, learner: Learner) -> None:
        sink = served.sink()
        await sink.apply(V1, learner.manifest(V1))
        manifest = learner.manifest(V2)
        with pytest.raises(PublishError, match="the learner wrote 00"):
            await sink.apply(V2, {**manifest, "checksum": "00"})
        with pytest.raises(PublishError, match=r"run\.folder must be on a file system"):
            await sink.apply(V2, {**manifest, "folder": str(tmp_path / "elsewhere")})
        assert_exact(await ask(served, 8), V1, learner, forward_logprobs)

    on_server(server, model_folders[0], tmp_path, job)


def test_a_use_keeps_an_adapter_from_being_idle():
    adapters = Adapters(PolicyVersion(0))
    with adapters.use() as base:
        adapters.loaded(V1)
        with adapters.use() as first, adapters.use():
            adapters.loaded(V2)
            assert (base.name, first.name) == (None, "1.0")
            assert adapters.idle() == []
        assert adapters.idle() == [V1]
    adapters.forget(V1)
    assert adapters.idle() == []
    with adapters.use() as newest:
        assert newest == (V2, "2.0")


def test_only_the_newest_folders_are_kept(model_folders: tuple[Path, Path], tmp_path: Path):
    learner = Learner(config_of(model_folders[0]), tmp_path)
    for version in (V1, V2, V3):
        learner.manifest(version)
    assert sorted(folder.name for folder in (tmp_path / "adapters").iterdir()) == ["2.0", "3.0"]


@pytest.mark.slow
def test_a_server_is_started_for_the_adapters_of_the_run(model_folders: tuple[Path, Path]):
    arguments = server_arguments(config_of(model_folders[0]), index=0)
    assert arguments["max_lora_rank"] == 4
    assert arguments["lora_target_modules"][:3] == ["q_proj", "k_proj", "v_proj"]
    assert arguments["max_loras_per_batch"] == 4  # staleness 2: three versions and the base
    whole = Config.model_validate({"model": {"path": model_folders[0]}, "learner": {"lora": {"rank": 4}}})
    assert "enable_lora" not in server_arguments(whole, index=0)

"""What tests of several packages share."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import settings

from streamrl.config import Config
from streamrl.engine.client import EngineClient
from streamrl.engine.server import Server
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan
from tests.units import Units, place_of

if TYPE_CHECKING:
    import torch

_NEW = PolicyVersion(0)

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # as under make: no test asks the hub

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")


def pytest_xdist_make_scheduler(config: pytest.Config) -> Units:
    return Units(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file stay in their order, and files of a folder in theirs."""
    items.sort(key=lambda item: place_of(item.nodeid))


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """`make_group(group_id, attempt=0, version=..., samples=2, tokens=5)`: a plain group made from its id."""
    return _make_group


def _make_group(
    group_id: int = 0,
    *,
    attempt: int = 0,
    version: PolicyVersion = _NEW,
    samples: int = 2,
    tokens: int = 5,
    task: str = "copy",
) -> Group:
    """A plain group whose numbers follow from its id."""
    random = np.random.default_rng(group_id)
    prompt = random.integers(0, 1000, 7, dtype=np.int32)
    return Group(
        group_id=group_id,
        attempt=attempt,
        task=task,
        prompt_index=group_id,
        samples=tuple(
            Sample(
                prompt_ids=prompt,
                output_ids=random.integers(0, 1000, tokens, dtype=np.int32),
                logprobs=-random.random(tokens, dtype=np.float32),
                loss_mask=np.ones(tokens, np.bool_),
                spans=(VersionSpan(version, 0, tokens),) if tokens else (),
                reward=float(index),
                reward_parts={"exact": float(index)},
            )
            for index in range(samples)
        ),
        started=1.0,
        finished=2.0,
        worker="generator-0",
    )


START_TIMEOUT = 200.0  # seconds; SGLang imports for 15 s on a quiet machine and for more than a minute on a busy one


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny models of one shape with different random weights, sharp enough to tell them apart by any token."""
    import torch
    from safetensors.torch import load_file, save_file

    from launch import tiny_model

    folders = []
    for seed in (1, 2):
        folder = tmp_path_factory.mktemp("models") / f"seed{seed}"
        tiny_model.make(folder, seed)
        generator = torch.Generator().manual_seed(seed)
        weights = {
            name: 0.3 * torch.randn(tensor.shape, generator=generator) if tensor.ndim > 1 else tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        folders.append(folder)
    return folders[0], folders[1]


@pytest.fixture(scope="session")
def serving() -> Callable[..., AbstractContextManager[Server]]:
    """`with serving(config, folder) as server`: a real SGLang server, ready, and stopped at the end."""

    @contextmanager
    def run(config: Config, folder: Path) -> Iterator[Server]:
        server = Server(config, folder, index=0)

        async def wait() -> None:
            client = EngineClient(server.address, timeout=30)
            try:
                await server.ready(client, START_TIMEOUT)
            finally:
                await client.close()

        try:
            asyncio.run(wait())
            yield server
        finally:
            asyncio.run(server.stop())

    return run


@pytest.fixture(scope="session")
def lazy_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH for processes that are to have NCCL's manners on a CPU (`tests/publish/lazy_backend.py`)."""
    from tests.publish import lazy_backend

    return lazy_backend.install(tmp_path_factory.mktemp("backend"))


@pytest.fixture(scope="session")
def engine_server(
    model_folders: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
    serving: Callable[..., AbstractContextManager[Server]],
    lazy_path: str,
) -> Iterator[Server]:
    """One SGLang server for all tests, with the first of `model_folders` at its start."""
    config = Config.model_validate({"model": {"path": model_folders[0]}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", lazy_path)
        started = serving(config, tmp_path_factory.mktemp("engine"))
        with started as server:
            patch.undo()
            yield server


@pytest.fixture
def fresh_server(engine_server: Server, model_folders: tuple[Path, Path]) -> Server:
    """`engine_server` with the first model's weights as version 0.0, whatever a test before left it with."""

    async def restore() -> None:
        client = EngineClient(engine_server.address, timeout=60)
        try:
            if (await client.model_info()).weight_version != "0.0":
                await client.update_from_disk(str(model_folders[0]), "0.0")
        finally:
            await client.close()

    asyncio.run(restore())
    return engine_server


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each answer that a server gives: how many tokens of its prompt it found in the cache."""
    counts: list[int] = []
    post = EngineClient._post

    async def counting(self: EngineClient, path: str, body: dict[str, Any], timeout: float | None = None) -> bytes:
        content = await post(self, path, body, timeout)
        if path == "/generate":
            counts.append(json.loads(content)["meta_info"]["cached_tokens"])
        return content

    monkeypatch.setattr(EngineClient, "_post", counting)
    return counts


@pytest.fixture(scope="session")
def forward_logprobs(model_folders: tuple[Path, Path]) -> Callable[..., torch.Tensor]:
    """`forward_logprobs(weights, ids, temperature=1.0)`: log-probs [T - 1] of ids 1..T-1, by Hugging Face."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folders[0], dtype=torch.float32).eval()

    def forward(weights: dict[str, torch.Tensor], ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        model.load_state_dict(weights, strict=False)
        model.tie_weights()
        tokens = torch.tensor([list(ids)])
        with torch.no_grad():
            logits = model(tokens).logits[0, :-1] / temperature
        return torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]

    return forward


@pytest.fixture
def exhaust() -> Iterator[Callable[[], None]]:
    """`exhaust()`: no descriptor can be had any more, until the end of the test."""
    taken: list[int] = []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)

    def take() -> None:
        # Above the highest: a descriptor beyond the limit could not be had again once it is closed.
        most = 8 + max(256, *map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, limit[1]))
        while len(taken) < most:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                return

    yield take
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)

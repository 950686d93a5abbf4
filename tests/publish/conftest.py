"""The backends that groups of weights have: gloo itself, and NCCL's manners on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from streamrl import device
from streamrl.device import Device
from streamrl.engine.kept_memory import SingleMemory
from streamrl.publish.broadcast_source import BroadcastSource
from streamrl.publish.staging import Memory, Staged, Staging
from streamrl.types import PolicyVersion
from tests.publish import lazy_backend
from tests.publish.receiver import Receiver

TIMEOUT = 240.0  # seconds; a process imports torch for 5 s on a quiet machine and for more than a minute on a busy one
BUCKET = 1 << 16  # several buckets for the tiny model


class LazyDevice(Device):
    """A CPU whose groups are of the lazy backend."""

    @property
    def backend(self) -> Any:
        return lazy_backend.NAME


@dataclass(frozen=True)
class Backend:
    """One of them, as a learner has it."""

    device: Device
    staging: list[Staging] = field(default_factory=list)  # whose memory lasts as long as the test

    @property
    def name(self) -> str:
        return self.device.backend

    @property
    def lazy(self) -> bool:
        return self.name == lazy_backend.NAME

    def source(self, timeout: float = TIMEOUT) -> BroadcastSource:
        return BroadcastSource("127.0.0.1", self.device, timeout)

    def staged(self, model: Path, step: int) -> Staged:
        """The model's weights as version `step`."""
        self.staging.append(Staging(BUCKET, self.memory()))
        return self.staging[-1].fill(PolicyVersion(step), load_file(model / "model.safetensors").items())

    def memory(self) -> Memory | None:
        return SingleMemory() if self.lazy else None


@pytest.fixture
def gloo() -> Backend:
    return Backend(Device("cpu", 0))


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch, lazy_path: str) -> Backend:
    """As if this process had GPUs, and processes that it starts NCCL."""
    there = LazyDevice("cpu", 0)
    monkeypatch.setattr(device, "detect", lambda: there)
    monkeypatch.setenv("PYTHONPATH", lazy_path)
    return Backend(there)


@pytest.fixture(params=["gloo", "lazy"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """`broadcast over lazy` is `broadcast`, where the learner has GPUs."""
    name, _, over = str(request.param).partition(" over ")
    if over:
        request.getfixturevalue(over)
    return name


@pytest.fixture(scope="module")
def other(lazy_path: str) -> Iterator[Receiver]:
    """The server that nothing happens to."""
    receiver = Receiver(lazy_path)
    yield receiver
    receiver.kill()


@pytest.fixture
def lost(lazy_path: str) -> Iterator[Receiver]:
    """The one to which it does."""
    receiver = Receiver(lazy_path)
    yield receiver
    receiver.kill()

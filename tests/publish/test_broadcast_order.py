"""NCCL's rank 0 brings a bucket to the device while the one before it goes out, on a stream of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pytest
import torch

from streamrl.publish import rank_zero_process
from streamrl.publish.rank_zero_process import _Groups


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

    def pin(self, memory: np.ndarray, *, read_only: bool = False) -> None: ...

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


def test_a_bucket_comes_to_the_device_while_the_one_before_it_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    copying = Sending(told)
    groups = _Groups(copying, timedelta(seconds=1))
    groups._members["group"] = object()

    def begin(members: object, data: torch.Tensor) -> Broadcast:
        assert copying.inside  # it waits for this stream, not for what the learner computes
        told.append(f"broadcast {len(data)}")
        return Broadcast(told, data)

    monkeypatch.setattr(rank_zero_process, "begin", begin)
    meeting = rank_zero_process.Meeting(group="group", host="h", port=1, world_size=2, backend="nccl")
    groups._broadcast(meeting, [torch.zeros(size, dtype=torch.uint8) for size in (8, 12, 16)])
    assert told == [
        "into 8", "broadcast 8", "into 12", "completed 8", "broadcast 12", "into 16", "completed 12",
        "broadcast 16", "completed 16",
    ]  # fmt: skip

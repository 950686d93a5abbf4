"""A copy of the weights in flattened buckets, so that publishing works while the next step changes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import xxhash

from streamrl.engine.kept_memory import Place
from streamrl.engine.load_plan import BucketLayout
from streamrl.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors as one run of bytes."""

    layout: BucketLayout
    data: torch.Tensor  # uint8 [bytes], on the CPU

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and view of each tensor."""
        start = 0
        for name, dtype, shape in zip(self.layout.names, self.layout.dtypes, self.layout.shapes, strict=True):
            kind = getattr(torch, dtype)
            size = torch.Size(shape).numel() * kind.itemsize
            yield name, self.data[start : start + size].view(kind).view(shape)
            start += size


@dataclass(frozen=True, slots=True)
class Staged:
    """One version, complete, until the next one is staged over it."""

    version: PolicyVersion
    buckets: tuple[Bucket, ...]
    place: Place | None = None  # where other processes find the buckets, if they are kept for them

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self.buckets:
            yield from bucket.tensors()


class Memory(Protocol):
    """Where buckets lie."""

    def begin(self) -> None:
        """A new version: from here on nothing of a former one is read in what `allocate` gives."""

    def allocate(self, index: int, size: int) -> np.ndarray:
        """Bucket `index`, uint8 [size]."""

    def finish(self) -> Place | None:
        """All buckets are written. Where other processes find them, if they do."""

    def leave(self) -> None:
        """A reader that nobody can stop may have what was given: it is not given again."""


class OwnMemory:
    """Of this process alone, each bucket's kept for the next version."""

    def __init__(self) -> None:
        self._buckets: list[np.ndarray] = []
        self._used = 0

    def begin(self) -> None:
        self._used = 0

    def allocate(self, index: int, size: int) -> np.ndarray:
        if index == len(self._buckets):
            self._buckets.append(np.empty(size, np.uint8))
        elif len(self._buckets[index]) < size:
            self._buckets[index] = np.empty(size, np.uint8)
        self._used = index + 1
        return self._buckets[index][:size]

    def finish(self) -> None:
        del self._buckets[self._used :]

    def leave(self) -> None:
        self._buckets = []


class Staging:
    """Keeps the buckets' memory from one version to the next."""

    def __init__(self, bucket_bytes: int, memory: Memory | None = None) -> None:
        """A bucket holds `bucket_bytes` at most, or one tensor that is larger. `memory`: None: of this process alone.

        With memory of this process alone the weights exist twice; after `leave` a third time, while a reader lasts.
        """
        self._limit = bucket_bytes
        self._memory = memory or OwnMemory()

    def fill(self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """Copy `tensors`, taken one after another, over a version that was staged before.

        Raises ValueError when there is none, or when a name comes twice.
        """
        buckets: list[Bucket] = []
        seen: set[str] = set()
        self._memory.begin()
        for content in self._split(tensors):
            for name, _ in content:
                if name in seen:
                    raise ValueError(f"version {version}: tensor {name} comes twice")
                seen.add(name)
            buckets.append(self._copy(len(buckets), content))
        if not buckets:
            raise ValueError(f"version {version} has no tensors")
        return Staged(version, tuple(buckets), self._memory.finish())

    def leave(self) -> None:
        """Stage the next version elsewhere: somebody who cannot be stopped may still read this one."""
        self._memory.leave()

    def _split(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Runs of tensors that fit into a bucket, each tensor at a multiple of its item size (the sink views it)."""
        content: list[tuple[str, torch.Tensor]] = []
        used = 0
        for name, tensor in tensors:
            if content and (used + tensor.nbytes > self._limit or used % tensor.itemsize):
                yield content
                content, used = [], 0
            content.append((name, tensor))
            used += tensor.nbytes
        if content:
            yield content

    def _copy(self, index: int, content: list[tuple[str, torch.Tensor]]) -> Bucket:
        size = sum(tensor.nbytes for _, tensor in content)
        data = torch.from_numpy(self._memory.allocate(index, size))
        start = 0
        for _, tensor in content:
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            data[start : start + tensor.nbytes].copy_(flat)
            start += tensor.nbytes
        layout = BucketLayout(
            names=tuple(name for name, _ in content),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in content),
            shapes=tuple(tuple(tensor.shape) for _, tensor in content),
            bytes=size,
            checksum=xxhash.xxh3_64_hexdigest(data.numpy().data),
        )
        return Bucket(layout, data)

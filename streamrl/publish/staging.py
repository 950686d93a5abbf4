"""A copy of the weights in flattened buckets, so that publishing works while the next step changes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import xxhash

from streamrl.publish.transport import BucketLayout
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

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self.buckets:
            yield from bucket.tensors()


class Staging:
    """Keeps the buckets' memory from one version to the next: the weights exist twice, never three times."""

    def __init__(self, bucket_bytes: int) -> None:
        """A bucket holds `bucket_bytes` at most, or one tensor that is larger."""
        self._limit = bucket_bytes
        self._memory: list[torch.Tensor] = []  # uint8, one a bucket

    def fill(self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]]) -> Staged:
        """Copy `tensors`, taken one after another, over the version that was staged before.

        Raises ValueError when there is none, or when a name comes twice.
        """
        buckets: list[Bucket] = []
        seen: set[str] = set()
        for content in self._split(tensors):
            for name, _ in content:
                if name in seen:
                    raise ValueError(f"version {version}: tensor {name} comes twice")
                seen.add(name)
            buckets.append(self._copy(len(buckets), content))
        if not buckets:
            raise ValueError(f"version {version} has no tensors")
        del self._memory[len(buckets) :]
        return Staged(version, tuple(buckets))

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
        data = self._allocate(index, size)
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

    def _allocate(self, index: int, size: int) -> torch.Tensor:
        """The memory of bucket `index`: that of the version before where it is large enough."""
        if index == len(self._memory):
            self._memory.append(torch.empty(size, dtype=torch.uint8))
        elif len(self._memory[index]) < size:
            self._memory[index] = torch.empty(size, dtype=torch.uint8)
        return self._memory[index][:size]

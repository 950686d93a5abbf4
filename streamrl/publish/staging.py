"""A copy of the weights in flattened buckets, so that publishing works while the next step changes them.

training   fill: begins the copies ──▶ goes on; the weights change when `copied` is done
publisher  waits for `copied` ──▶ reads the bytes, hashes them where checksums are compared
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from msgspec.structs import replace

from streamrl.device_copy import DONE, Copied, CpuCopy, DeviceCopy
from streamrl.engine.kept_memory import Place
from streamrl.engine.load_plan import BucketLayout
from streamrl.publish.transport import bucket_checksum
from streamrl.stream.messages import ScoredAnswer
from streamrl.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors as one run of bytes."""

    layout: BucketLayout  # without its checksum
    data: torch.Tensor  # uint8 [bytes], on the CPU

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and view of each tensor."""
        start = 0
        for name, dtype, shape in zip(self.layout.names, self.layout.dtypes, self.layout.shapes, strict=True):
            kind = getattr(torch, dtype)
            size = torch.Size(shape).numel() * kind.itemsize
            yield name, self.data[start : start + size].view(kind).view(shape)
            start += size


@dataclass(slots=True, eq=False)
class Staged:
    """One version, complete once `copied` is done, until the next one is staged over it."""

    version: PolicyVersion
    buckets: tuple[Bucket, ...]
    place: Place | None = None  # where other processes find the buckets, if they are kept for them
    copied: Copied = DONE  # before it neither may the bytes be read nor the weights change
    scored: tuple[ScoredAnswer, ...] = ()  # by the learner with it, for each server to do the same
    _hashed: tuple[BucketLayout, ...] = field(default=(), init=False)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self.buckets:
            yield from bucket.tensors()

    def layouts(self, *, checksums: bool) -> tuple[BucketLayout, ...]:
        """What lies in each bucket. `checksums`: with that of the bytes, computed the first time that one asks."""
        if not checksums:
            return tuple(bucket.layout for bucket in self.buckets)
        if not self._hashed:
            self._hashed = tuple(
                replace(bucket.layout, checksum=bucket_checksum(bucket.data.numpy().data)) for bucket in self.buckets
            )
        return self._hashed


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
    """Memory of this process alone; each bucket's is kept for the next version."""

    def __init__(self) -> None:
        self._buckets: list[np.ndarray] = []
        self._used = 0

    def begin(self) -> None:
        self._used = 0

    def allocate(self, index: int, size: int) -> np.ndarray:
        if index == len(self._buckets):
            self._buckets.append(_pages(size))
        elif len(self._buckets[index]) < size:
            self._buckets[index] = _pages(size)
        self._used = index + 1
        return self._buckets[index][:size]

    def finish(self) -> None:
        del self._buckets[self._used :]

    def leave(self) -> None:
        self._buckets = []


# Ends of names of tensors that follow each other, of which SGLang makes one weight when it has loaded both: it keeps
# the first one until the end of the bucket alone, and says nothing (0.5.23, DeepSeek-V3).
JOINED = (("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),)


def _is_joined(content: Sequence[tuple[str, torch.Tensor]], name: str) -> bool:
    """Whether a tensor must be in the bucket of those before it."""
    former = content[-1][0] if content else ""
    return any(former.endswith(first) and name.endswith(second) for first, second in JOINED)


class Staging:
    """Keeps the buckets' memory from one version to the next."""

    def __init__(self, bucket_bytes: int, memory: Memory | None = None, copy: DeviceCopy | None = None) -> None:
        """A bucket holds `bucket_bytes` at most, or one tensor that is larger. `memory`: None: of this process alone.

        With memory of this process alone the weights exist twice; after `leave` a third time, while a reader lasts.
        `copy`: out of the device that the tensors are on; None: a CPU.
        """
        self._limit = bucket_bytes
        self._memory = memory or OwnMemory()
        self._copying = copy or CpuCopy()

    def fill(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]], resident: Collection[int] = ()
    ) -> Staged:
        """Begin to copy `tensors`, taken one after another, over a version that was staged before.

        resident: as of `DeviceCopy.out`. Raises ValueError when there is no tensor, or when a name comes twice.
        """
        buckets: list[Bucket] = []
        seen: set[str] = set()
        self._memory.begin()
        for content in self._split(tensors):
            for name, _ in content:
                if name in seen:
                    raise ValueError(f"version {version}: tensor {name} comes twice")
                seen.add(name)
            buckets.append(self._copy(len(buckets), content, resident))
        if not buckets:
            raise ValueError(f"version {version} has no tensors")
        # A reader of the memory learns from a manifest where it is. The manifest is made when the bytes are there.
        return Staged(version, tuple(buckets), self._memory.finish(), self._copying.mark())

    def leave(self) -> None:
        """Stage the next version elsewhere: somebody who cannot be stopped may still read this one."""
        self._memory.leave()

    def _split(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Runs of tensors that fit into a bucket, each tensor at a multiple of its item size (the sink views it)."""
        content: list[tuple[str, torch.Tensor]] = []
        used = 0
        for name, tensor in tensors:
            full = used + tensor.nbytes > self._limit and not _is_joined(content, name)
            if content and (full or used % tensor.itemsize):
                yield content
                content, used = [], 0
            content.append((name, tensor))
            used += tensor.nbytes
        if content:
            yield content

    def _copy(self, index: int, content: list[tuple[str, torch.Tensor]], resident: Collection[int]) -> Bucket:
        size = sum(tensor.nbytes for _, tensor in content)
        memory = self._memory.allocate(index, size)
        self._copying.pin(memory)
        data = torch.from_numpy(memory)
        self._copying.out([tensor for _, tensor in content], data, resident)
        layout = BucketLayout(
            names=tuple(name for name, _ in content),
            dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in content),
            shapes=tuple(tuple(tensor.shape) for _, tensor in content),
            bytes=size,
        )
        return Bucket(layout, data)


def _pages(size: int) -> np.ndarray:
    """uint8 [size] with whole pages of its own, which alone can be pinned; large ones, where the kernel has them."""
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # EINVAL of a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, size)

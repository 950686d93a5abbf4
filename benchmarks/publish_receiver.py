"""A receiver of `benchmarks.publish`: a process with a model's tensors, which takes versions in as a server would.

What a server does in SGLang's code (receive a bucket, copy it into the model) is done here by the same calls of
torch; everything else is streamrl's own code of the worker and of the loader in the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash
from safetensors import safe_open

from streamrl.config.replay import StreamConfig
from streamrl.engine.kept_memory import KeptReader, Place
from streamrl.engine.load_plan import BucketLayout, LoadPlan
from streamrl.engine.memory_loader import load_plan
from streamrl.publish.delta_sink import DeltaSink
from streamrl.publish.memory_sink import MemorySink
from streamrl.publish.model_folder import WEIGHTS, checksum
from streamrl.publish.transport import BroadcastManifest, DiskManifest
from streamrl.types import PolicyVersion

DEADLINE = 300.0  # seconds that one version may take

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Order:
    """Take in what a manifest describes; without a transport: tell the checksum of what is there."""

    transport: str = ""
    version: PolicyVersion | None = None
    manifest: dict[str, Any] | None = None


class Model:
    """bf16 tensors by name, which weights are copied into."""

    def __init__(self, shapes: Shapes) -> None:
        self.tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)

    def checksum(self) -> str:
        return checksum_of(self.tensors)


def checksum_of(tensors: dict[str, torch.Tensor]) -> str:
    """xxh3_64 of all bytes, by name."""
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        digest.update(tensors[name].view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Here:
    """The last step of the sinks, without a server between: SGLang's loader called in this process."""

    whole = True  # what fails here ends the process

    def __init__(self, model: Model) -> None:
        self._model = model
        self._reader = KeptReader()

    async def load(self, version: PolicyVersion, place: Place, buckets: Sequence[BucketLayout], verify: bool) -> None:
        plan = LoadPlan(place=place, buckets=tuple(buckets), verify=verify, receipt="", rank=0)
        receipt = load_plan(self._model, plan, self._reader)
        assert receipt.status == "loaded", receipt


class Broadcasts:
    """The server's end of a weight group, as SGLang makes it."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._group = ""
        self._members: Any = None
        self._buffers: dict[int, torch.Tensor] = {}

    def receive(self, manifest: dict[str, Any]) -> None:
        plan = msgspec.convert(manifest, BroadcastManifest)
        if plan.group != self._group:
            self._join(plan)
        for index, bucket in enumerate(plan.buckets):
            buffer = self._buffers.setdefault(index, torch.empty(bucket.bytes, dtype=torch.uint8))
            options = dist.BroadcastOptions()
            options.rootRank = 0
            self._members.broadcast([buffer], options).wait()
            self._model.load_weights(_views(bucket, buffer))

    def _join(self, plan: BroadcastManifest) -> None:
        from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper

        timeout = timedelta(seconds=DEADLINE)
        store = dist.TCPStore(plan.host, plan.port, is_master=False, timeout=timeout)
        self._members, _ = _new_process_group_helper(
            plan.world_size,
            1,
            [],
            Backend(plan.backend),
            PrefixStore(plan.group, store),
            group_name=GroupName(plan.group),
            timeout=timeout,
        )
        self._group = plan.group


def _views(bucket: BucketLayout, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    start = 0
    for name, shape in zip(bucket.names, bucket.shapes, strict=True):
        size = 2 * torch.Size(shape).numel()
        yield name, flat[start : start + size].view(torch.bfloat16).view(shape)
        start += size


def take_folder(model: Model, manifest: dict[str, Any]) -> None:
    """The worker compares the checksum, the server loads the file."""
    plan = msgspec.convert(manifest, DiskManifest)
    file = Path(plan.folder) / WEIGHTS
    assert checksum(file) == plan.checksum
    with safe_open(file, framework="pt") as weights:
        model.load_weights((name, weights.get_tensor(name)) for name in weights.keys())  # noqa: SIM118


def receive(shapes: Shapes, orders: Connection) -> None:
    """The process: one answer for each order, until None."""
    torch.set_num_threads(1)
    model = Model(shapes)
    broadcasts = Broadcasts(model)
    memory = MemorySink(Here(model))
    delta = DeltaSink(Here(model), StreamConfig(curve="off"), None, DEADLINE)
    while (order := orders.recv()) is not None:
        manifest = order.manifest or {}
        if order.transport == "broadcast":
            broadcasts.receive(manifest)
        elif order.transport == "disk":
            take_folder(model, manifest)
        elif order.transport:
            assert order.version is not None
            asyncio.run((memory if order.transport == "memory" else delta).apply(order.version, manifest))
        orders.send("" if order.transport else model.checksum())

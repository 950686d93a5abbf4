"""The sink of changed weights: keeps the version that its server has, changes it, and has the server load it again.

    what changed since the kept version, else the whole one ──▶ apply ──▶ checksums ──▶ as `memory` does

The kept version lies in memory that the server reads (`engine/kept_memory.py`). Checksums are compared every time:
where they differ after a change, the chain is broken and the whole version is fetched at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from streamrl.config.replay import StreamConfig
from streamrl.engine.kept_memory import KeptMemory, Place
from streamrl.engine.load_plan import BucketLayout
from streamrl.publish.delta_codec import apply
from streamrl.publish.transport import (
    DeltaManifest,
    Loading,
    PublishError,
    Sink,
    as_publish_errors,
    bucket_checksum,
    delta_name,
    read_manifest,
    whole_name,
)
from streamrl.stream.keys import KeysUnusable
from streamrl.stream.parcels import ParcelClient, ParcelRefused
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)


class DeltaSink(Sink):
    """The end of `publish.transport: delta` at one server."""

    def __init__(self, loading: Loading, stream: StreamConfig, keys: Path | None, timeout: float) -> None:
        """`keys`: the folder of the run's keys. `timeout`: seconds that a version's bytes may take."""
        self._loading = loading
        self._stream = stream
        self._keys = keys
        self._timeout = timeout
        self._memory = KeptMemory()
        self._changing: asyncio.Task[None] | None = None  # writes into the memory, maybe for a try that was given up
        self._arrays: list[np.ndarray] = []  # the kept version, a bucket each
        self._buckets: tuple[BucketLayout, ...] = ()  # what it is, checksums included
        self._version = ""  # empty: nothing whole is kept
        self._place: Place | None = None

    @property
    def whole(self) -> bool:
        return self._loading.whole

    async def apply(self, version: PolicyVersion, manifest: dict[str, Any]) -> None:
        plan = read_manifest(manifest, DeltaManifest, version)
        try:
            async with asyncio.timeout(self._timeout):
                await self._receive(str(version), plan)
        except TimeoutError as error:
            reason = f"version {version} did not arrive from {plan.address} in publish.timeout={self._timeout:g} s"
            raise PublishError(reason) from error
        except (ParcelRefused, KeysUnusable, zmq.ZMQError, OSError, MemoryError) as error:
            raise PublishError(f"version {version} from {plan.address}: {error}") from error
        assert self._place is not None
        with as_publish_errors():
            await self._loading.load(version, self._place, plan.buckets, plan.verify)

    async def _receive(self, version: str, plan: DeltaManifest) -> None:
        """Bring the kept version to `version`."""
        client = ParcelClient(plan.address, plan.server_key, self._stream, self._keys)
        try:
            kept = self._version == version and self._buckets == plan.buckets  # from a try whose loading failed
            if not kept and not await self._change(client, version, plan):
                await self._replace(client, version, plan)
            await client.done(plan.order)
        finally:
            client.close()

    async def _change(self, client: ParcelClient, version: str, plan: DeltaManifest) -> bool:
        """Go along the chain from the kept version. False: it is not in the chain, or the chain is broken."""
        if self._version not in plan.chain:
            return False
        links = plan.chain[plan.chain.index(self._version) :]
        changes = [  # all of them first: what breaks off on the way leaves the kept version whole
            [await client.fetch(plan.order, delta_name(base, index)) for index in range(len(plan.buckets))]
            for base in links
        ]
        self._open([bucket.bytes for bucket in plan.buckets], keep=True)
        self._changing = asyncio.create_task(asyncio.to_thread(_apply_all, self._arrays, changes))
        try:
            await asyncio.shield(self._changing)  # a timeout ends this wait, and no thread
        except ValueError as error:
            log.warning("version %s: %s: the whole version is fetched", version, error)
            return False
        return await self._close(version, plan)

    async def _replace(self, client: ParcelClient, version: str, plan: DeltaManifest) -> None:
        self._open([bucket.bytes for bucket in plan.buckets], keep=False)
        for index, target in enumerate(self._arrays):
            await client.fetch(plan.order, whole_name(version, index), target)
        if not await self._close(version, plan):
            raise PublishError(f"version {version} came with other checksums than announced")

    def _open(self, sizes: Sequence[int], keep: bool) -> None:
        """Take the memory for writing; `keep`: with what it holds.

        Memory with the server inside is left to it, and memory that is still being changed to the thread that does.
        """
        former, self._version = self._arrays, ""
        is_changing = self._changing is not None and not self._changing.done()
        inside = is_changing or not self._memory.begin()
        if inside:
            memory = KeptMemory()  # where there is none, the former one stays as it is
            self._memory.close()
            self._memory, self._changing = memory, None
            self._memory.begin()
        self._arrays = [self._memory.allocate(index, size) for index, size in enumerate(sizes)]
        if inside and keep:
            for target, source in zip(self._arrays, former, strict=True):
                target[:] = source

    async def _close(self, version: str, plan: DeltaManifest) -> bool:
        """Let the server in, if the memory holds what was announced."""
        checksums = await asyncio.to_thread(_checksums, self._arrays)
        if checksums != [bucket.checksum for bucket in plan.buckets]:
            log.warning("version %s: the checksums are not those that were announced", version)
            return False
        self._place = self._memory.finish()
        self._version, self._buckets = version, plan.buckets
        return True


def _apply_all(arrays: Sequence[np.ndarray], changes: Sequence[Sequence[np.ndarray]]) -> None:
    for link in changes:
        for target, delta in zip(arrays, link, strict=True):
            apply(target, delta.data)


def _checksums(arrays: Sequence[np.ndarray]) -> list[str]:
    return [bucket_checksum(array.data) for array in arrays]

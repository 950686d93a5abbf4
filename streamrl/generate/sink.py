"""The sink of the weights: takes a new version into one SGLang server while its requests wait.

    join the group (once) ──▶ pause ──▶ begin ──▶ bucket after bucket ──▶ end ──▶ continue

A failure before any weight was touched changes nothing: the server goes on with the old ones. After it
the server may hold parts of two versions and stays paused, so that no token comes from them; the
publisher tries again, and a version that arrives whole lets the server go on.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from streamrl.engine.client import EngineClient, EngineError, Interruption
from streamrl.publish.transport import BroadcastManifest, BucketLayout, PublishError, Sink
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

NOTHING_RECEIVED = "Failed to receive weights"
# How SGLang begins its answer when a broadcast broke off, before it loads any of the bucket.


class BroadcastSink(Sink):
    """The end of `publish.transport: broadcast` at one server."""

    def __init__(self, client: EngineClient, interruption: Interruption, timeout: float) -> None:
        """`timeout`: seconds that one call may take."""
        self._client = client
        self._interruption = interruption
        self._timeout = timeout
        self._group: str | None = None
        self._whole = True  # all weights of the server are of one version

    async def apply(self, version: PolicyVersion, manifest: dict[str, Any]) -> None:
        try:
            plan = msgspec.convert(manifest, BroadcastManifest)
        except msgspec.ValidationError as error:
            raise PublishError(f"manifest of version {version}: {error}") from error
        try:
            if plan.group != self._group:
                await self._join(plan)
            await self._update(version, plan)
        except EngineError as error:
            raise PublishError(str(error)) from error

    async def _join(self, plan: BroadcastManifest) -> None:
        """Join the source's group in place of the former one, if any."""
        if self._group is not None:
            former, self._group = self._group, None
            try:
                await self._client.destroy_weights_group(former, self._timeout)
            except EngineError as error:
                log.warning("the former weight group was not destroyed: %s", error)
        await self._client.init_weights_group(
            host=plan.host,
            port=plan.port,
            world_size=plan.world_size,
            group=plan.group,
            backend=plan.backend,
            timeout=self._timeout,
        )
        self._group = plan.group

    async def _update(self, version: PolicyVersion, plan: BroadcastManifest) -> None:
        await self._client.pause(self._interruption, self._timeout)
        try:
            await self._client.begin_weight_update(self._timeout)
            for index, bucket in enumerate(plan.buckets):
                await self._receive(version, plan, index, bucket)
            await self._client.end_weight_update(self._timeout)
        except EngineError:
            await self._close_update()
            raise
        await self._client.resume(self._timeout)

    async def _close_update(self) -> None:
        """After a failure: leave the server ready for the next try, and generating if it may."""
        try:
            await self._client.end_weight_update(self._timeout)
        except EngineError as error:
            log.info("no update was open: %s", error)
        if self._whole:
            await self._client.resume(self._timeout)

    async def _receive(self, version: PolicyVersion, plan: BroadcastManifest, index: int, bucket: BucketLayout) -> None:
        """One bucket. Until the last one the server's version is no policy version, which nobody accepts."""
        last = index == len(plan.buckets) - 1
        was_whole, self._whole = self._whole, False
        try:
            await self._client.update_from_distributed(
                bucket.names,
                bucket.dtypes,
                bucket.shapes,
                group=plan.group,
                version=str(version) if last else f"{version}-partial",
                # What is retracted is computed again with the new weights, from an empty cache. `in_place`
                # keeps its requests in the cache, and SGLang refuses to flush under them.
                flush_cache=last and self._interruption == "retract",
                timeout=self._timeout,
            )
        except EngineError as error:
            self._whole = was_whole and NOTHING_RECEIVED in error.reason
            raise
        self._whole = last

"""The sink of broadcast weights: takes a new version, bucket after bucket, into one SGLang server.

    join the group (once) ──▶ requests wait ──▶ begin ──▶ bucket after bucket ──▶ end ──▶ requests go on

Between the first bucket and the last the server's weights are of no version, and nothing is drawn from them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.load_plan import BucketLayout
from streamrl.publish.transport import (
    GLOO,
    BroadcastManifest,
    PublishError,
    Sink,
    Update,
    as_publish_errors,
    end_open_update,
    read_manifest,
)
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

# How SGLang begins its answer when a broadcast broke off, before it loads any of the bucket.
NOTHING_RECEIVED = "Failed to receive weights"


class BroadcastSink(Sink):
    """The end of `publish.transport: broadcast` at one server."""

    def __init__(self, client: EngineClient, update: Update, timeout: float) -> None:
        """`timeout`: seconds that one call may take."""
        self._client = client
        self._update = update
        self._timeout = timeout
        self._group: str | None = None
        self._stuck = False

    @property
    def whole(self) -> bool:
        return self._update.whole

    @property
    def stuck(self) -> bool:
        return self._stuck

    async def apply(self, version: PolicyVersion, manifest: dict[str, Any]) -> None:
        plan = read_manifest(manifest, BroadcastManifest, version)
        with as_publish_errors():
            if plan.group != self._group:
                await self._join(plan)
            await self._load(version, plan)

    async def _join(self, plan: BroadcastManifest) -> None:
        """Join the source's group in place of the former one, if any."""
        if self._group is not None:
            former, self._group = self._group, None
            try:
                await self._client.destroy_weights_group(former, self._timeout)
            except EngineError as error:
                log.warning("the former weight group was not destroyed: %s", error)
        await self._check_source(plan)
        try:
            await self._client.init_weights_group(
                host=plan.host,
                port=plan.port,
                world_size=plan.world_size,
                group=plan.group,
                backend=plan.backend,
                timeout=self._timeout,
            )
        except EngineError as error:
            self._stuck = error.late
            raise
        self._group = plan.group

    async def _check_source(self, plan: BroadcastManifest) -> None:
        """Raise PublishError where nobody listens: a server that joins waits for its source for half an hour."""
        try:
            async with asyncio.timeout(self._timeout):
                _, writer = await asyncio.open_connection(plan.host, plan.port)
        except (OSError, TimeoutError) as error:
            raise PublishError(f"the source of group {plan.group} is gone: {plan.host}:{plan.port}: {error}") from error
        writer.close()

    async def _load(self, version: PolicyVersion, plan: BroadcastManifest) -> None:
        async with self._update.waiting():
            try:
                await self._client.begin_weight_update(self._timeout)
                for index, bucket in enumerate(plan.buckets):
                    await self._receive(version, plan, index, bucket)
                await self._client.end_weight_update(self._timeout)
            except EngineError:
                if not self._stuck:
                    await end_open_update(self._client, self._timeout)
                raise

    async def _receive(self, version: PolicyVersion, plan: BroadcastManifest, index: int, bucket: BucketLayout) -> None:
        """One bucket. Until the last one the server's version is no policy version, which nobody accepts."""
        last = index == len(plan.buckets) - 1
        was_whole, self._update.whole = self._update.whole, False
        try:
            await self._client.update_from_distributed(
                bucket.names,
                bucket.dtypes,
                bucket.shapes,
                group=plan.group,
                version=str(version) if last else f"{version}-partial",
                flush_cache=last and self._update.flush_cache,
                timeout=self._timeout,
            )
        except EngineError as error:
            self._update.whole = was_whole and NOTHING_RECEIVED in error.reason
            self._stuck = error.late and plan.backend != GLOO
            raise
        self._update.whole = last

"""The sink of weights in memory of the learner's host: sees that they are visible here, has one server load them."""

from __future__ import annotations

from typing import Any

from streamrl.engine.kept_memory import Unreadable, check_readable
from streamrl.publish.transport import Loading, MemoryManifest, PublishError, Sink, as_publish_errors, read_manifest
from streamrl.types import PolicyVersion


class MemorySink(Sink):
    """The end of `publish.transport: memory` at one server."""

    def __init__(self, loading: Loading) -> None:
        self._loading = loading

    @property
    def whole(self) -> bool:
        return self._loading.whole

    async def apply(self, version: PolicyVersion, manifest: dict[str, Any]) -> None:
        plan = read_manifest(manifest, MemoryManifest, version)
        try:
            check_readable(plan.place)
        except Unreadable as error:
            raise PublishError(
                f"version {version}: {error}; publish.transport=memory needs learner, worker and servers on one host, "
                "in one PID namespace, under one user"
            ) from error
        with as_publish_errors():
            await self._loading.load(version, plan.place, plan.buckets, plan.verify)

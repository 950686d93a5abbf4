"""The sink of weights on a shared file system: compares the folder's checksum, has one SGLang server load it.

    compare ──▶ requests wait ──▶ /update_weights_from_disk ──▶ requests go on

The checksum is that of the file as this worker sees it; the server reads the same path.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from streamrl.engine.client import EngineClient, EngineError
from streamrl.publish.model_folder import WEIGHTS, checksum
from streamrl.publish.transport import DiskManifest, PublishError, Sink, Update, as_publish_errors, read_manifest
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

# How SGLang begins its answer when it found no weights to load, as where it does not see the folder.
NOTHING_LOADED = "Failed to get weights iterator"


class DiskSink(Sink):
    """The end of `publish.transport: disk` at one server."""

    def __init__(self, client: EngineClient, update: Update, timeout: float) -> None:
        """`timeout`: seconds that one call may take."""
        self._client = client
        self._update = update
        self._timeout = timeout

    @property
    def whole(self) -> bool:
        return self._update.whole

    async def apply(self, version: PolicyVersion, manifest: dict[str, Any]) -> None:
        plan = read_manifest(manifest, DiskManifest, version)
        await asyncio.to_thread(_check, plan)
        with as_publish_errors():
            async with self._update.waiting():
                await self._load(version, plan.folder)

    async def _load(self, version: PolicyVersion, folder: str) -> None:
        was_whole, self._update.whole = self._update.whole, False
        try:
            await self._client.update_from_disk(
                folder,
                str(version),
                load_format="safetensors",  # whatever the server itself was started with
                keep_requests=True,
                flush_cache=self._update.flush_cache,
                timeout=self._timeout,
            )
        except EngineError as error:
            self._update.whole = was_whole and NOTHING_LOADED in error.reason
            if not self._update.whole:
                await self._disown(version)
            raise
        self._update.whole = True

    async def _disown(self, version: PolicyVersion) -> None:
        """Parts of two versions are no policy version: a worker that attaches later must not take them for one.

        SGLang gives the weights their new name only when all of them are loaded.
        """
        try:
            await self._client.update_weight_version(f"{version}-partial", self._timeout)
        except EngineError as error:
            log.warning("the server keeps its former version's name: %s", error)


def _check(plan: DiskManifest) -> None:
    """Raises PublishError where the weights are not those that were announced."""
    file = Path(plan.folder) / WEIGHTS
    try:
        found = checksum(file)
    except OSError as error:
        raise PublishError(
            f"{file}: {error.strerror}; learner, workers and servers must see publish.folder under one path"
        ) from error
    if found != plan.checksum:
        raise PublishError(f"{file}: checksum {found}, announced was {plan.checksum}")

"""Low-rank adapters on a server: which one a request takes, how a new one comes in, when an old one goes.

    apply: check the folder ─▶ forget idle adapters ─▶ load ─▶ requests that begin now take the new one
    request: use the newest ─▶ generate by its name ─▶ stamp the answer with its version ─▶ give it back

A request keeps its adapter to its end, so nothing is interrupted and a token's log-prob is exactly that of the
version stamped on it. Several versions are on a server at once; an old one goes when its last request has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from streamrl.engine.answers import Answer, Piece, PrefillScores, WeightVersionSpan
from streamrl.engine.client import EngineClient, EngineError
from streamrl.publish.peft import checksum
from streamrl.publish.transport import AdapterManifest, PublishError, Sink, read_manifest
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)


class Use(NamedTuple):
    """The right of one request to a version: `name` is the server's for its adapter, None for the base weights."""

    version: PolicyVersion
    name: str | None


class Adapters:
    """The adapters of one server: the newest, which new requests on_piece, and those that requests still use."""

    def __init__(self, version: PolicyVersion) -> None:
        """`version` of the base weights that the server starts with: generating with it needs no adapter."""
        self._newest = version
        self._base = version
        self._loaded: set[PolicyVersion] = set()
        self._users: Counter[PolicyVersion] = Counter()

    @contextlib.contextmanager
    def use(self) -> Iterator[Use]:
        """What a request generates with; it stays loaded until the end of the block."""
        version = self._newest
        self._users[version] += 1
        try:
            yield Use(version, str(version) if version in self._loaded else None)
        finally:
            self._users[version] -= 1

    def has(self, version: PolicyVersion) -> bool:
        """Whether the server can generate with `version`."""
        return version in self._loaded or version == self._base

    def loaded(self, version: PolicyVersion) -> None:
        """The server has this adapter now: new requests take it."""
        self._loaded.add(version)
        self._newest = version

    def idle(self) -> list[PolicyVersion]:
        """Adapters that no request uses and none will."""
        return sorted(version for version in self._loaded if version != self._newest and not self._users[version])

    def forget(self, version: PolicyVersion) -> None:
        """The server does not have this adapter any more."""
        self._loaded.discard(version)
        del self._users[version]


class AdapterPolicy:
    """The newest version of a server with adapters, as `Policy` (generate/inference.py)."""

    def __init__(self, client: EngineClient, adapters: Adapters) -> None:
        self._client = client
        self._adapters = adapters

    async def generate(self, *request: Any, **options: Any) -> list[Answer]:
        """EngineClient.generate by the newest adapter; its version is on every token of the answers."""
        with self._adapters.use() as use:
            if on_piece := options.get("pieces"):
                options["pieces"] = lambda piece: on_piece(_stamped_piece(piece, use.version))
            answers = await self._client.generate(*request, adapter=use.name, **options)
        return [_stamped(answer, use.version) for answer in answers]

    async def score(self, *request: Any, **options: Any) -> PrefillScores:
        """EngineClient.score by the newest adapter."""
        with self._adapters.use() as use:
            scores = await self._client.score(*request, adapter=use.name, **options)
        return replace(scores, version=str(use.version))

    async def abort(self, request_id: str = "") -> None:
        await self._client.abort(request_id)


def _stamped(answer: Answer, version: PolicyVersion) -> Answer:
    """The server itself stamps the version of its base weights."""
    span = WeightVersionSpan(str(version), 0, len(answer.output_ids))
    return replace(answer, meta_info=replace(answer.meta_info, weight_versions=(span,)))


def _stamped_piece(piece: Piece, version: PolicyVersion) -> Piece:
    meta = piece.meta_info
    spans = (WeightVersionSpan(str(version), 0, meta.completion_tokens),) if meta.finish_reason else ()
    return replace(piece, meta_info=replace(meta, weight_version=str(version), weight_versions=spans))


class AdapterSink(Sink):
    """The end of `learner.lora.publish: adapter` at one server."""

    def __init__(self, client: EngineClient, adapters: Adapters, timeout: float) -> None:
        """`timeout`: seconds that one call may take."""
        self._client = client
        self._adapters = adapters
        self._timeout = timeout

    async def apply(self, version: PolicyVersion, manifest: dict[str, Any]) -> None:
        plan = read_manifest(manifest, AdapterManifest, version)
        await asyncio.to_thread(_check, plan)
        for old in self._adapters.idle():
            await self._unload(old)
        if self._adapters.has(version):
            return
        await load_adapter(self._client, version, plan.folder, self._timeout)
        self._adapters.loaded(version)

    async def _unload(self, version: PolicyVersion) -> None:
        """One that does not go costs memory, and is tried again with the next version."""
        try:
            await self._client.unload_adapter(str(version), self._timeout)
        except EngineError as error:
            log.warning("the adapter of version %s stays loaded: %s", version, error)
            return
        self._adapters.forget(version)


async def load_adapter(client: EngineClient, version: PolicyVersion, folder: str, timeout: float) -> None:
    """Load the adapter of `version`, in place of one of that name that a former worker left. Raises PublishError."""
    name = str(version)
    try:
        await client.load_adapter(name, folder, timeout)
    except EngineError as error:
        log.info("adapter %s is loaded again: %s", name, error)
        try:
            await client.unload_adapter(name, timeout)
            await client.load_adapter(name, folder, timeout)
        except EngineError:
            raise PublishError(str(error)) from error


def _check(plan: AdapterManifest) -> None:
    try:
        found = checksum(Path(plan.folder))
    except OSError as error:
        raise PublishError(
            f"{plan.folder} cannot be read here ({error}); run.folder must be on a file system that learner and "
            "generators share"
        ) from error
    if found != plan.checksum:
        raise PublishError(f"{plan.folder} has the checksum {found}, the learner wrote {plan.checksum}")

"""The two ends of a weight transport: a Source in the learner, a Sink in the worker, and a manifest that joins them.

    Source.manifest ──▶ Publish(server, version, manifest) ──▶ Sink.apply
    Source.send     ════════════ the bytes ════════════════▶ server

The manifest travels through the replay service, the bytes do not. No torch here: the worker has none.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import xxhash

from streamrl.config import Config
from streamrl.config.replay import StreamConfig
from streamrl.engine.client import EngineClient, EngineError
from streamrl.engine.kept_memory import Place
from streamrl.engine.load_plan import BucketLayout
from streamrl.stream.address import host_towards
from streamrl.stream.messages import Buffer, ServerState
from streamrl.types import PolicyVersion

if TYPE_CHECKING:
    from streamrl.publish.staging import Staged

log = logging.getLogger(__name__)

GLOO = "gloo"  # the one backend whose broadcast ends, with an error, at either end when the other is lost

Manifest = TypeVar("Manifest", bound=msgspec.Struct)

# Called while a source waits, at least every few milliseconds; raises PublishError when it should stop waiting.
Check = Callable[[], None]


class PublishError(RuntimeError):
    """A server did not get a version; the text says why."""


class BroadcastManifest(msgspec.Struct, frozen=True, kw_only=True, tag_field="transport", tag="broadcast"):
    """How to receive one version by broadcasts of a torch.distributed group."""

    group: str  # name of the group; a sink that has not joined it does so first
    host: str  # where rank 0, the source, listens for the others
    port: int
    world_size: int  # the source and all ranks of the server
    backend: str  # gloo | nccl
    buckets: tuple[BucketLayout, ...]  # one broadcast each, in this order


class DiskManifest(msgspec.Struct, frozen=True, kw_only=True, tag_field="transport", tag="disk"):
    """Where one version's weights lie: a Hugging Face folder that learner, worker and server see under one path."""

    folder: str
    checksum: str  # xxh3_64 of its model.safetensors, hexadecimal


class MemoryManifest(msgspec.Struct, frozen=True, kw_only=True, tag_field="transport", tag="memory"):
    """Where one version's weights lie in memory of the learner's host."""

    place: Place
    buckets: tuple[BucketLayout, ...]
    verify: bool  # the server compares the buckets' checksums before it loads


class DeltaManifest(msgspec.Struct, frozen=True, kw_only=True, tag_field="transport", tag="delta"):
    """Where to ask for one version's bytes, and from which versions on what changed is enough."""

    address: str
    server_key: str  # of the socket there, Z85; empty: not encrypted
    order: int  # to be said with every question
    chain: tuple[str, ...]  # versions in the order in which they were published; each leads to the next, the last here
    buckets: tuple[BucketLayout, ...]
    verify: bool  # the server compares the buckets' checksums before it loads


def delta_name(base: str, bucket: int) -> str:
    """The parcel of what changed in a bucket from version `base` to the one published after it."""
    return f"{base}>/{bucket}"


def whole_name(version: str, bucket: int) -> str:
    """The parcel of a whole bucket."""
    return f"{version}/{bucket}"


class AdapterManifest(msgspec.Struct, frozen=True, kw_only=True, tag_field="transport", tag="adapter"):
    """Where one version's adapter lies: a PEFT folder that learner and servers see under one path."""

    folder: str
    checksum: str  # xxh3_64 of its adapter_model.safetensors, hexadecimal


def read_manifest(manifest: dict[str, Any], kind: type[Manifest], version: PolicyVersion) -> Manifest:
    """The manifest of `version` in the form of its transport. Raises PublishError where it has another one."""
    try:
        return msgspec.convert(manifest, kind)
    except msgspec.ValidationError as error:
        raise PublishError(f"manifest of version {version}: {error}") from error


def is_verified(version: PolicyVersion, every: int) -> bool:
    """Whether servers compare checksums before they load `version`. `every`: `publish.verify_every`."""
    return bool(every) and version.step % every == 0


def bucket_checksum(data: Buffer) -> str:
    """xxh3_64 of a bucket, hexadecimal. The interpreter goes on meanwhile; one call of an older xxhash holds it."""
    digest = xxhash.xxh3_64()
    digest.update(data)
    return digest.hexdigest()


class Source(ABC):
    """The learner's end. Used by one thread."""

    @abstractmethod
    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        """What the server's sink must know to receive `staged`; nothing is sent yet. It may take as long as it needs.

        Raises PublishError, whatever goes wrong.
        """

    @abstractmethod
    def send(self, server: ServerState, staged: Staged, check: Check) -> None:
        """Send the bytes that `manifest` announced. Raises PublishError, whatever goes wrong."""

    @abstractmethod
    def drop(self, server: str) -> None:
        """Let go of what is kept for this server: it has failed or left. Must not wait for it."""

    def reads_on(self) -> bool:
        """Whether bytes that `send` was given may still go out to a dropped server: they must not be written over."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Let go of every server."""


class Sink(ABC):
    """The worker's end, for one server."""

    @property
    def whole(self) -> bool:
        """Whether all weights of the server are of one version; a failed `apply` may leave it with parts of two."""
        return True

    @property
    def stuck(self) -> bool:
        """Whether the server waits, inside a call, for a source that will not come: only its restart ends that."""
        return False

    @abstractmethod
    async def apply(self, version: PolicyVersion, manifest: dict[str, Any]) -> None:
        """Make the server generate with `version`. Raises PublishError, whatever goes wrong."""


class Update(Protocol):
    """How the requests of one server wait while its weights change. A sink says in `whole` what it has done to them."""

    whole: bool  # all weights of the server are of one version

    @property
    def flush_cache(self) -> bool:
        """Whether the server is to forget what the old weights computed."""
        ...

    def waiting(self) -> contextlib.AbstractAsyncContextManager[None]:
        """No token is drawn inside the block. Raises EngineError, or PublishError where requests do not end."""
        ...


class Loading(Protocol):
    """The last step of a sink whose weights lie in memory of this host."""

    @property
    def whole(self) -> bool:
        """As of `Sink`."""
        ...

    async def load(self, version: PolicyVersion, place: Place, buckets: Sequence[BucketLayout], verify: bool) -> None:
        """Have them loaded. Raises EngineError or PublishError."""


@dataclass(frozen=True, slots=True)
class LearnerEnd:
    """What a transport makes its source of."""

    config: Config
    run_folder: Path
    service: str  # the replay service's address

    @property
    def host(self) -> str:
        """This machine's address on the way to the replay service, where the servers' workers are as well."""
        return host_towards(self.service)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerEnd:
    """What a transport makes a sink of: one server, as its worker reaches it."""

    client: EngineClient
    update: Update
    loading: Loading  # has the server load out of memory of its host
    stream: StreamConfig
    keys: Path | None  # the folder of the run's keys
    timeout: float  # seconds that one call may take


@contextlib.contextmanager
def as_publish_errors() -> Iterator[None]:
    """What a server did not do is a publish that failed."""
    try:
        yield
    except EngineError as error:
        raise PublishError(str(error)) from error


async def end_open_update(client: EngineClient, timeout: float) -> None:
    """Leave a server ready for its next weight update, where the last one has failed or was broken off.

    timeout: seconds that the call may take.
    """
    try:
        await client.end_weight_update(timeout)
    except EngineError as error:
        log.info("%s: no weight update was open: %s", client.address, error)

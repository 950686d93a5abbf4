"""Weights as what changed since the version before: for links that are slower than the learner's memory.

    manifest: encode once a version ──▶ (sink: from its own base along the chain, or the whole version) ──▶ applied

    chain   4.0 ─▶ 5.0 ─▶ 6.0 ─▶ 7.0     a server at any of them gets what lies between; another one gets 7.0 whole

A chain that would be no smaller than the version itself is cut. The bytes go over a socket of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from streamrl.config.replay import StreamConfig
from streamrl.engine.load_plan import BucketLayout
from streamrl.publish.delta_codec import encode
from streamrl.publish.staging import Staged
from streamrl.publish.transport import Check, DeltaManifest, PublishError, Source, delta_name, is_verified, whole_name
from streamrl.stream.door import DoorFailed
from streamrl.stream.keys import KeysUnusable
from streamrl.stream.messages import Buffer, ServerState
from streamrl.stream.parcels import ParcelServer
from streamrl.types import PolicyVersion

CHAIN = 8  # versions that a server may be behind and still get what changed; more are rarely smaller than the whole

WAIT = 0.002  # seconds between two polls of what the replay service says, while nobody asks for bytes


@dataclass(frozen=True, slots=True)
class _Link:
    """What changed between two versions that were published one after the other."""

    base: PolicyVersion
    parcels: dict[str, Buffer]
    bytes: int


class DeltaSource(Source):
    """Keeps the version that went out last, to compare the next one with: the weights exist once more."""

    def __init__(self, host: str, stream: StreamConfig, keys: Path, verify_every: int) -> None:
        """`host`: this machine's address as the workers see it. `keys`: the folder of the run's keys."""
        self._listen = partial(ParcelServer, host, stream, keys)
        self.parcels = self._listen()
        self._verify_every = verify_every
        self._order = 0  # number of the newest manifest: who still asks for a former one is refused
        self._version: PolicyVersion | None = None
        self._base: list[np.ndarray] = []  # the bytes of that version, a bucket each
        self._shape: list[tuple] = []  # what its buckets hold
        self._chain: deque[_Link] = deque()

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        try:
            if self.parcels.is_closed:
                self.parcels = self._listen()
            if staged.version != self._version:
                self._add(staged)
        except MemoryError as error:
            raise PublishError(f"no memory for what changed in version {staged.version}: {error}") from error
        except (KeysUnusable, zmq.ZMQError) as error:
            raise PublishError(f"no socket for version {staged.version}: {error}") from error
        self._order += 1
        manifest = DeltaManifest(
            address=self.parcels.address,
            server_key=self.parcels.public_key,
            order=self._order,
            chain=tuple(str(link.base) for link in self._chain),
            buckets=staged.layouts(checksums=True),
            verify=is_verified(staged.version, self._verify_every),
        )
        described: dict[str, Any] = msgspec.to_builtins(manifest)
        return described

    def send(self, server: ServerState, staged: Staged, check: Check) -> None:
        whole = {
            whole_name(str(staged.version), index): bucket.data.numpy().data
            for index, bucket in enumerate(staged.buckets)
        }

        def find(name: str) -> Buffer | None:
            return next((link.parcels[name] for link in self._chain if name in link.parcels), whole.get(name))

        while not self._serve(find):
            check()

    def drop(self, server: str) -> None:
        """Nothing is kept for a server."""

    def close(self) -> None:
        self.parcels.close()

    def _serve(self, find: Callable[[str], Buffer | None]) -> bool:
        try:
            return self.parcels.serve(self._order, find, WAIT)
        except (DoorFailed, zmq.ZMQError) as error:
            self.parcels.close()  # nobody guards it, or it is broken; the next manifest names another
            raise PublishError(f"the socket for the weights: {error}") from error

    def _add(self, staged: Staged) -> None:
        """Lengthen the chain by `staged`, and keep it to compare the next version with."""
        shape = [_shape(bucket.layout) for bucket in staged.buckets]
        if shape == self._shape and self._version is not None:
            self._link(self._version, staged)
        else:
            self._chain.clear()
            self._base = [np.empty(bucket.layout.bytes, np.uint8) for bucket in staged.buckets]
        for kept, bucket in zip(self._base, staged.buckets, strict=True):
            kept[:] = bucket.data.numpy()
        self._shape, self._version = shape, staged.version

    def _link(self, base: PolicyVersion, staged: Staged) -> None:
        parcels: dict[str, Buffer] = {}
        for index, (former, bucket) in enumerate(zip(self._base, staged.buckets, strict=True)):
            changed = encode(former, bucket.data.numpy(), _word(bucket.layout))
            if changed is None:  # the chain is cut: the whole version is smaller
                self._chain.clear()
                return
            parcels[delta_name(str(base), index)] = changed
        self._chain.append(_Link(base, parcels, sum(len(parcel) for parcel in parcels.values())))
        whole = sum(bucket.layout.bytes for bucket in staged.buckets)
        while self._chain and (len(self._chain) > CHAIN or sum(link.bytes for link in self._chain) >= whole):
            self._chain.popleft()


def _shape(layout: BucketLayout) -> tuple:
    return layout.names, layout.dtypes, layout.shapes


def _word(layout: BucketLayout) -> int:
    """Bytes of the bucket's smallest number, so that every number is made of whole words."""
    return min(4, *(int(getattr(torch, dtype).itemsize) for dtype in layout.dtypes))

"""Weights through memory of one host: the staging copy itself is what the servers load from.

    manifest: where the copy lies ──▶ (sink: its server's loader reads it there, under a lock)

Two copies take turns, and a server that still reads one keeps the learner out of it (`engine/kept_memory.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.publish.staging import Staged
from streamrl.publish.transport import Check, MemoryManifest, Source, is_verified
from streamrl.stream.messages import ServerState


class MemorySource(Source):
    """Tells where a version lies; the servers fetch it for themselves."""

    def __init__(self, verify_every: int) -> None:
        """`verify_every`: `publish.verify_every`."""
        self._verify_every = verify_every

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        assert staged.place is not None  # the transport stages into kept memory
        verify = is_verified(staged.version, self._verify_every)
        manifest = MemoryManifest(place=staged.place, buckets=staged.layouts(checksums=verify), verify=verify)
        described: dict[str, Any] = msgspec.to_builtins(manifest)
        return described

    def send(self, server: ServerState, staged: Staged, check: Check) -> None:
        """Nothing: the server reads the memory."""

    def drop(self, server: str) -> None:
        """Nothing is kept for a server."""

    def close(self) -> None:
        """The memory goes with the staging copy, and with the last server that has it mapped."""

"""Low-rank adapters to the servers: a PEFT folder a version, which servers load beside the base weights they keep.

    manifest: write RUN/adapters/VERSION ──▶ (sink: the server loads it) ──▶ requests name it

The run folder must be on a file system that learner and generators share, as it is on one machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config.learner import LoraConfig
from streamrl.publish.peft import checksum, write_adapter
from streamrl.publish.staging import Staged
from streamrl.publish.transport import AdapterManifest, Check, Source
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

KEPT = 2  # newest folders: the one that goes out, and the one before for a server that still reads it


class AdapterSource(Source):
    """Writes each version once; the servers read it for themselves."""

    def __init__(self, run_folder: Path, settings: LoraConfig, base: Path) -> None:
        """`base`: the model that the adapters belong to."""
        self._root = run_folder / "adapters"
        self._settings = settings
        self._base = base
        self._written: PolicyVersion | None = None
        self._checksum = ""

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        folder = self._root / str(staged.version)
        if self._written != staged.version:
            write_adapter(folder, staged.tensors(), self._settings, self._base)
            self._written, self._checksum = staged.version, checksum(folder)
            self._forget_older()
        described: dict[str, Any] = msgspec.to_builtins(
            AdapterManifest(folder=str(folder.resolve()), checksum=self._checksum)
        )
        return described

    def send(self, server: ServerState, staged: Staged, check: Check) -> None:
        """Nothing: the server reads the folder."""

    def drop(self, server: str) -> None:
        """Nothing is kept for a server."""

    def close(self) -> None:
        """The newest folders stay, for servers that are reading them."""

    def _forget_older(self) -> None:
        versions = sorted(PolicyVersion.parse(folder.name) for folder in self._root.glob("[0-9]*.[0-9]*"))
        for version in versions[:-KEPT]:
            if version != self._written:
                shutil.rmtree(self._root / str(version), ignore_errors=True)

"""Low-rank adapters to the servers: a PEFT folder a version, which servers load beside the base weights they keep.

    manifest: write RUN/adapters/VERSION ──▶ (sink: the server loads it) ──▶ requests name it

The run folder must be on a file system that learner and generators share, as it is on one machine.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from streamrl.config.learner import LoraConfig
from streamrl.publish.peft import checksum, write_adapter
from streamrl.publish.staging import Staged
from streamrl.publish.transport import AdapterManifest, Check, PublishError, Source
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
        for draft in self._root.glob(".*"):  # of a learner that was killed while it wrote
            shutil.rmtree(draft, ignore_errors=True)

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        folder = self._root / str(staged.version)
        if self._written != staged.version:
            self._write(folder, staged)
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

    def _write(self, folder: Path, staged: Staged) -> None:
        try:
            write_adapter(folder, staged.tensors(), self._settings, self._base)
            self._checksum = checksum(folder)
        except (OSError, SafetensorError) as error:
            raise PublishError(f"version {staged.version} was not written: {error}") from error
        self._written = staged.version
        self._forget_older()

    def _forget_older(self) -> None:
        """By the time of writing: a learner that went back to a checkpoint writes lower steps again."""
        folders = sorted(self._root.glob("[0-9]*.[0-9]*"), key=lambda folder: folder.stat().st_mtime_ns)
        for folder in folders[:-KEPT]:
            shutil.rmtree(folder, ignore_errors=True)

"""Weights through a shared file system: a Hugging Face folder a version, which every server loads for itself.

    manifest: write ROOT/VERSION once ──▶ (sink: compares the checksum, has its server load the folder)

A folder gets its name when all of it is there, so that a version is whole or not at all.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from streamrl.publish.model_folder import WEIGHTS, checksum, write_model
from streamrl.publish.staging import Staged
from streamrl.publish.transport import Check, DiskManifest, PublishError, Source
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion

KEPT = 2  # newest folders: the one that goes out, and the one before for a server that is still reading it


class DiskSource(Source):
    """Writes each version once; the servers read it for themselves."""

    def __init__(self, root: Path, model: Path) -> None:
        """`root`: the run's own folder for its versions. `model`: whose configuration and tokenizer go with them."""
        self._root = root
        self._model = model
        self._written: PolicyVersion | None = None
        self._checksum = ""
        for draft in root.glob(".*"):  # of a learner that was killed while it wrote
            shutil.rmtree(draft, ignore_errors=True)

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        folder = self._root / str(staged.version)
        if self._written != staged.version:
            self._write(folder, staged)
        described: dict[str, Any] = msgspec.to_builtins(
            DiskManifest(folder=str(folder.resolve()), checksum=self._checksum)
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
            write_model(folder, staged, self._model)
            self._checksum = checksum(folder / WEIGHTS)
        except (OSError, SafetensorError) as error:
            raise PublishError(f"version {staged.version} was not written: {error}") from error
        self._written = staged.version
        self._forget_older()

    def _forget_older(self) -> None:
        """By the time of writing: a learner that went back to a checkpoint writes lower steps again."""
        folders = sorted(self._root.glob("[0-9]*.[0-9]*"), key=lambda folder: folder.stat().st_mtime_ns)
        for folder in folders[:-KEPT]:
            shutil.rmtree(folder, ignore_errors=True)

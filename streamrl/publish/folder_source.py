"""Versions as folders that servers read for themselves: each written once, whole or not at all, the newest ones kept.

manifest: write ROOT/VERSION, once ──▶ (sink: compares the checksum, has its server load the folder)
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from safetensors import SafetensorError

from streamrl.publish.staging import Staged
from streamrl.publish.transport import AdapterManifest, Check, DiskManifest, PublishError, Source
from streamrl.stream.messages import ServerState
from streamrl.types import PolicyVersion
from streamrl.whole_files import clear

KEPT = 2  # newest folders: the one that goes out, and the one before for a server that is still reading it


class FolderSource(Source):
    """What kind of folder it is, a subclass says."""

    announces: ClassVar[type[AdapterManifest | DiskManifest]]

    def __init__(self, root: Path) -> None:
        """`root`: the run's own folder for its versions."""
        self._root = root
        self._written: PolicyVersion | None = None
        self._checksum = ""
        clear(root)

    @abstractmethod
    def write(self, folder: Path, staged: Staged) -> str:
        """Write the folder, whole or not at all. Returns its checksum. Raises OSError or SafetensorError."""

    def manifest(self, server: ServerState, staged: Staged) -> dict[str, Any]:
        folder = self._root / str(staged.version)
        try:
            if self._written != staged.version:
                self._write(folder, staged)
            manifest = self.announces(folder=str(folder.resolve()), checksum=self._checksum)
        except (OSError, SafetensorError) as error:
            raise PublishError(f"version {staged.version} was not written: {error}") from error
        described: dict[str, Any] = msgspec.to_builtins(manifest)
        return described

    def send(self, server: ServerState, staged: Staged, check: Check) -> None:
        """Nothing: the server reads the folder."""

    def drop(self, server: str) -> None:
        """Nothing is kept for a server."""

    def close(self) -> None:
        """The newest folders stay, for servers that are reading them."""

    def _write(self, folder: Path, staged: Staged) -> None:
        self._checksum = self.write(folder, staged)
        self._written = staged.version
        self._remove_older()

    def _remove_older(self) -> None:
        """By the time of writing: a learner that went back to a checkpoint writes lower steps again."""
        folders = sorted(self._root.glob("[0-9]*.[0-9]*"), key=lambda folder: folder.stat().st_mtime_ns)
        for folder in folders[:-KEPT]:
            shutil.rmtree(folder, ignore_errors=True)

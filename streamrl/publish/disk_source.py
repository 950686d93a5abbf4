"""Weights through a shared file system: a Hugging Face folder a version, which every server loads for itself."""

from __future__ import annotations

import os
from pathlib import Path

from streamrl.config.file import ConfigError
from streamrl.locks import locked
from streamrl.publish.folder_source import FolderSource
from streamrl.publish.model_folder import WEIGHTS, checksum, write_model
from streamrl.publish.staging import Staged
from streamrl.publish.transport import DiskManifest


class DiskSource(FolderSource):
    """All weights of a version."""

    announces = DiskManifest

    def __init__(self, root: Path, model: Path, *, is_shared: bool = False) -> None:
        """`root`: the run's own folder for its versions. `model`: whose configuration and tokenizer go with them.

        is_shared: other runs could have the same one. Raises ConfigError where one that is under way has.
        """
        self._lock = _claimed(root) if is_shared else None
        super().__init__(root)
        self._model = model

    def close(self) -> None:
        super().close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, folder: Path, staged: Staged) -> str:
        write_model(folder, staged, self._model)
        return checksum(folder / WEIGHTS)


def _claimed(root: Path) -> int:
    """The lock of a folder in which versions of two runs would take each other's names, held until it is closed."""
    root.mkdir(parents=True, exist_ok=True)
    if (lock := locked(root / "lock")) is None:
        raise ConfigError(
            f"publish.folder: {root} has the versions of another run, which is under way; allowed: a run.name of its "
            "own, or another folder"
        )
    return lock

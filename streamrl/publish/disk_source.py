"""Weights through a shared file system: a Hugging Face folder a version, which every server loads for itself."""

from __future__ import annotations

from pathlib import Path

from streamrl.publish.folder_source import FolderSource
from streamrl.publish.model_folder import WEIGHTS, checksum, write_model
from streamrl.publish.staging import Staged
from streamrl.publish.transport import DiskManifest


class DiskSource(FolderSource):
    """All weights of a version."""

    announces = DiskManifest

    def __init__(self, root: Path, model: Path) -> None:
        """`root`: the run's own folder for its versions. `model`: whose configuration and tokenizer go with them."""
        super().__init__(root)
        self._model = model

    def write(self, folder: Path, staged: Staged) -> str:
        write_model(folder, staged, self._model)
        return checksum(folder / WEIGHTS)

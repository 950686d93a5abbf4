"""Low-rank adapters to the servers: a PEFT folder a version, which servers load beside the base weights they keep.

    manifest: write RUN/adapters/VERSION ──▶ (sink: the server loads it) ──▶ requests name it

The run folder must be on a file system that learner and generators share, as it is on one machine.
"""

from __future__ import annotations

from pathlib import Path

from streamrl.config.learner import LoraConfig
from streamrl.publish.folder_source import FolderSource
from streamrl.publish.peft import checksum, write_adapter
from streamrl.publish.staging import Staged
from streamrl.publish.transport import AdapterManifest


class AdapterSource(FolderSource):
    """The adapters of a version."""

    announces = AdapterManifest

    def __init__(self, run_folder: Path, settings: LoraConfig, base: Path) -> None:
        """`base`: the model that the adapters belong to."""
        super().__init__(run_folder / "adapters")
        self._settings = settings
        self._base = base

    def write(self, folder: Path, staged: Staged) -> str:
        write_adapter(folder, staged.tensors(), self._settings, self._base)
        return checksum(folder)

"""Published versions kept as Hugging Face or PEFT folders, `RUN/weights/VERSION`, for who checks the run afterwards."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from safetensors.torch import save_file

from streamrl.config import Config
from streamrl.publish.peft import write_adapter
from streamrl.publish.staging import Staged
from streamrl.types import PolicyVersion


def kept_folder(run_folder: Path, version: PolicyVersion) -> Path:
    """Where the weights of `version` are kept, if they are."""
    return run_folder / "weights" / str(version)


def kept_versions(run_folder: Path) -> dict[PolicyVersion, Path]:
    """Every version that a run kept, with its folder."""
    folders = (run_folder / "weights").glob("[0-9]*.[0-9]*")
    return {PolicyVersion.parse(folder.name): folder for folder in folders}


def keep(staged: Staged, config: Config, run_folder: Path) -> Path:
    """Write the version with the files of `model.path` that go with it, whole or not at all; where it is.

    Where adapters alone are published, it is a PEFT folder.
    """
    target, model = kept_folder(run_folder, staged.version), config.model.path
    if config.learner.lora.by_adapter:
        write_adapter(target, staged.tensors(), config.learner.lora, model)
        return target
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    for file in model.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model") and not _is_weight_index(file):
            shutil.copy(file, draft / file.name)
    save_file(
        dict(staged.tensors()), draft / "model.safetensors", metadata={"format": "pt", "version": str(staged.version)}
    )
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)
    return target


def _is_weight_index(file: Path) -> bool:
    """The index of a sharded checkpoint, which would point at files that the kept folder does not have."""
    return file.name.endswith(".index.json")

"""Published versions kept as Hugging Face or PEFT folders, `RUN/weights/VERSION`, for who checks the run afterwards."""

from __future__ import annotations

from pathlib import Path

from streamrl.config import Config
from streamrl.publish.model_folder import write_model
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
    else:
        write_model(target, staged, model)
    return target

"""Published versions kept as Hugging Face or PEFT folders, `RUN/weights/VERSION`, for who checks the run afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.config import Config
from streamrl.publish.model_folder import write_model
from streamrl.publish.peft import write_adapter

if TYPE_CHECKING:
    from streamrl.publish.staging import Staged


def kept_root(run_folder: Path) -> Path:
    """Where a run keeps weights: a folder for each version (`streamrl/recorded/weights.py` reads them)."""
    return run_folder / "weights"


def keep(staged: Staged, config: Config, run_folder: Path) -> Path:
    """Write the version with the files of `model.path` that go with it, whole or not at all; where it is.

    Where adapters alone are published, it is a PEFT folder.
    """
    target, model = kept_root(run_folder) / str(staged.version), config.model.path
    if config.learner.lora.by_adapter:
        write_adapter(target, staged.tensors(), config.learner.lora, model)
    else:
        write_model(target, staged, model)
    return target

"""Published versions kept as Hugging Face or PEFT folders, `RUN/weights/VERSION`, for who checks the run afterwards."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from streamrl.config import Config
from streamrl.observe.disk import lacks_room
from streamrl.observe.events import EventLog
from streamrl.publish.model_folder import write_model
from streamrl.publish.peft import write_adapter
from streamrl.whole_files import clear

if TYPE_CHECKING:
    from streamrl.publish.staging import Staged


log = logging.getLogger(__name__)


class KeptVersions:
    """Every `publish.keep_every`-th version of a run.

    Usage:
        kept = KeptVersions(config, run_folder, events)
        kept.add(staged)  # True
    """

    def __init__(self, config: Config, run_folder: Path, events: EventLog) -> None:
        self.lacks_room = False  # the disk had none for the last version
        self._config = config
        self._run_folder = run_folder
        self._events = events
        clear(kept_root(run_folder))

    def add(self, staged: Staged) -> bool:
        """Keep a version, if it is one of those. False where the disk has no room for it. Raises OSError and
        SafetensorError.
        """
        every = self._config.publish.keep_every
        if not every or staged.version.step % every:
            return True
        try:
            with self._events.span("publish.keep", version=str(staged.version)):
                keep(staged, self._config, self._run_folder)
        except (OSError, SafetensorError) as error:
            if not lacks_room(error):
                raise
            if not self.lacks_room:
                log.error("%s: %s; training waits for room", kept_root(self._run_folder), error)
            self.lacks_room = True
        else:
            self.lacks_room = False
        return not self.lacks_room


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

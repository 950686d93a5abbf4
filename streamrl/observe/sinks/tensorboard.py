"""TensorBoard."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.observe.disk import lacks_room
from streamrl.observe.sinks.base import Sink, numbers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from streamrl.choices import Options
    from streamrl.config import Config
    from streamrl.config.observe import ObserveConfig

log = logging.getLogger(__name__)


class TensorBoard(Sink):
    """Event files in RUN/tensorboard. They lack the rows for which the disk has no room: metrics.jsonl has them."""

    def __init__(self, config: Config, run_folder: Path, options: Options) -> None:
        super().__init__(config, run_folder, options)
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None  # from which on the next writer hides what former files say
        self._has_told = False  # that there is no room

    @classmethod
    def is_asked_for(cls, observe: ObserveConfig) -> bool:
        return observe.tensorboard

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        def write() -> None:
            writer = self._opened()
            for name, value in numbers(row).items():
                writer.add_scalar(name, value, step)
            writer.flush()

        self._with_room(write)

    def truncate_after(self, step: int) -> None:
        """TensorBoard hides what earlier files say of steps beyond `step`."""
        self.close()
        self._purge_step = step + 1
        self._with_room(self._opened)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        try:
            if writer is not None:
                writer.close()
        except OSError as error:
            if not lacks_room(error):
                raise

    def _opened(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = self.run_folder / "tensorboard"
            if self._purge_step is not None:
                _await_later_name(folder)
            self._writer = SummaryWriter(str(folder), purge_step=self._purge_step)
            self._purge_step = None
        return self._writer

    def _with_room(self, action: Callable[[], object]) -> None:
        """A writer that had no room raises its error for ever: the next row has another one."""
        try:
            action()
        except OSError as error:
            if not lacks_room(error):
                raise
            if not self._has_told:
                log.warning("%s: %s: rows are left out of it", self.run_folder / "tensorboard", error.strerror)
            self._has_told = True
            self.close()
        else:
            self._has_told = False


def _await_later_name(folder: Path) -> None:
    """TensorBoard reads files by name: by their second, and those of one second by a number of which 10 is before 9."""
    while any(folder.glob(f"*.tfevents.{int(time.time()):010}.*")):
        time.sleep(0.02)

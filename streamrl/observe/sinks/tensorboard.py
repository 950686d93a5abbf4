"""TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.observe.sinks.base import Sink, numbers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from streamrl.choices import Options
    from streamrl.config import Config
    from streamrl.config.observe import ObserveConfig


class TensorBoard(Sink):
    """Event files in RUN/tensorboard."""

    def __init__(self, config: Config, run_folder: Path, options: Options) -> None:
        super().__init__(config, run_folder, options)
        self._writer = self._open(purge_step=None)

    @classmethod
    def is_asked_for(cls, observe: ObserveConfig) -> bool:
        return observe.tensorboard

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        for name, value in numbers(row).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """TensorBoard hides what earlier files say of steps beyond `step`."""
        self._writer.close()
        self._writer = self._open(purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()

    def _open(self, purge_step: int | None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.run_folder / "tensorboard"), purge_step=purge_step)

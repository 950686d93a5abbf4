"""Where metrics go besides `metrics.jsonl`: Weights & Biases and TensorBoard, under the same names."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.config import Config

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Sink(ABC):
    """Takes the metrics of each step."""

    @abstractmethod
    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Take the row of `step`; what is no number is left out."""

    @abstractmethod
    def close(self) -> None:
        """Write what is pending and let go."""

    def truncate_after(self, step: int) -> None:  # noqa: B027 (optional)
        """A resume begins at `step`: forget later steps, where the sink can."""


class WandbSink(Sink):
    """Weights & Biases; `offline` writes to RUN/wandb and needs neither network nor account.

    A resumed run goes on under the id in RUN/wandb.id, and `step` is the axis of every chart.
    """

    def __init__(self, config: Config, run_folder: Path) -> None:
        import wandb

        identity = run_folder / "wandb.id"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=config.observe.wandb_project,
            name=config.run.name,
            id=identity.read_text(),
            resume="allow",
            dir=run_folder,
            mode="offline" if config.observe.wandb == "offline" else "online",
            config=config.model_dump(mode="json"),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **_numbers(row)})

    def close(self) -> None:
        self._run.finish()


class TensorBoardSink(Sink):
    """Event files in RUN/tensorboard."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / "tensorboard"
        self._writer = self._open(purge_step=None)

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row).items():
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

        return SummaryWriter(str(self._folder), purge_step=purge_step)


def open_sinks(config: Config, run_folder: Path) -> list[Sink]:
    """The sinks that `observe` asks for."""
    sinks: list[Sink] = []
    if config.observe.wandb != "off":
        sinks.append(WandbSink(config, run_folder))
    if config.observe.tensorboard:
        sinks.append(TensorBoardSink(run_folder))
    return sinks


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name != "step" and isinstance(value, int | float)}

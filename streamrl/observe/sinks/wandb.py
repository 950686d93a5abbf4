"""Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.observe.sinks.base import Sink, numbers

if TYPE_CHECKING:
    from streamrl.choices import Options
    from streamrl.config import Config
    from streamrl.config.tree import ObserveConfig


class Wandb(Sink):
    """Weights & Biases; `observe.wandb: offline` writes to RUN/wandb and needs neither network nor account.

    A resumed run goes on under the id in RUN/wandb.id, and `step` is the axis of every chart.
    """

    def __init__(self, config: Config, run_folder: Path, options: Options) -> None:
        import wandb

        super().__init__(config, run_folder, options)
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

    @classmethod
    def is_asked_for(cls, observe: ObserveConfig) -> bool:
        return observe.wandb != "off"

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **numbers(row)})

    def close(self) -> None:
        self._run.finish()

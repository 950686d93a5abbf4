"""Weights & Biases."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.config.file import shareable
from streamrl.observe.answers import COLUMNS, Answers
from streamrl.observe.sinks.base import Sink, numbers

if TYPE_CHECKING:
    from streamrl.choices import Options
    from streamrl.config import Config
    from streamrl.config.observe import ObserveConfig
    from streamrl.types import Batch


class Wandb(Sink):
    """Weights & Biases; `observe.wandb: offline` writes to RUN/wandb and needs neither network nor account.

    A resumed run goes on under the same id, that of RUN/run.json, and `step` is the axis of every chart. `answers` is
    a table of prompts and answers, every `observe.wandb_answers` steps.
    """

    def __init__(self, config: Config, run_folder: Path, options: Options) -> None:
        import wandb

        super().__init__(config, run_folder, options)
        self._wandb = wandb
        self._answers = Answers(config.model.path)
        self._run = wandb.init(
            project=config.observe.wandb_project,
            name=config.run.name,
            id=_identity(run_folder),
            resume="allow",
            dir=run_folder,
            mode="offline" if config.observe.wandb == "offline" else "online",
            config=shareable(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @classmethod
    def is_asked_for(cls, observe: ObserveConfig) -> bool:
        return observe.wandb != "off"

    @property
    def where(self) -> str | None:
        if self._run.offline:
            return f"offline; wandb sync {Path(self._run.dir).parent}"
        return self._run.url

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **numbers(row)})

    def write_batch(self, step: int, batch: Batch) -> None:
        """The first step too, so that a wrong prompt is seen at once."""
        every = self.config.observe.wandb_answers
        if every and (step == 1 or step % every == 0):
            table = self._wandb.Table(columns=list(COLUMNS), data=[list(row) for row in self._answers.rows(batch)])
            self._run.log({"step": step, "answers": table})

    def close(self) -> None:
        self._run.finish()


def _identity(run_folder: Path) -> str:
    """The id of the run at Weights & Biases: the one of RUN/wandb.id where it is there, else the run's own.

    A folder without an own id, which no run has, gets a random one.
    """
    kept, own = run_folder / "wandb.id", run_folder / "run.json"
    if not kept.exists():
        kept.write_text(json.loads(own.read_text())["id"] if own.exists() else uuid.uuid4().hex)
    return kept.read_text().strip()

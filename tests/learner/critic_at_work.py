"""What ranks do for a test of the critic: `critic_at_work.py CONFIG.json RUN_FOLDER OUT`, two steps and a save."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from learner_parts import make_batch

from streamrl.config import Config
from streamrl.learner.trainer import Trainer

STEPS = 2


def train_on(config: Config, run_folder: Path) -> list[dict[str, float]]:
    """Start or resume, train, save. Returns the metrics of the steps."""
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    rows = []
    for step in range(trainer.version.step, trainer.version.step + STEPS):
        rows.append(trainer.train_step(make_batch(step, groups=4) if trainer.rank == 0 else None))
    trainer.save()
    trainer.saved(wait=True)
    trainer.close()
    return rows


def main() -> None:
    config, run_folder, out = sys.argv[1:]
    rows = train_on(Config.model_validate_json(Path(config).read_text()), Path(run_folder))
    if int(os.environ["RANK"]) == 0:
        torch.save(rows, out)


if __name__ == "__main__":
    main()

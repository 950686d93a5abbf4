"""What the ranks of a test of the losses do: `losses_at_work.py CONFIG.json RUN_FOLDER OUT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from learner_parts import make_batch

from streamrl.config import Config
from streamrl.learner.trainer import Trainer


def two_steps(config: Config, run_folder: Path) -> list[dict[str, float]]:
    """The metrics of two steps from the start of a run."""
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    metrics = [trainer.train_step(make_batch(step, groups=4) if trainer.rank == 0 else None) for step in range(2)]
    trainer.close()
    return metrics


def main() -> None:
    config, run_folder, out = sys.argv[1:]
    metrics = two_steps(Config.model_validate_json(Path(config).read_text()), Path(run_folder))
    if int(os.environ["RANK"]) == 0:
        torch.save(metrics, out)


if __name__ == "__main__":
    main()

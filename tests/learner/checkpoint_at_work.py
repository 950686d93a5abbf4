"""What ranks do for a checkpoint's test: `checkpoint_at_work.py CONFIG.json RUN_FOLDER OUT STEPS`.

Start with two steps, or resume; save; then train STEPS more. Rank 0 writes to OUT what came of it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from learner_parts import make_batch, weights

from streamrl.config import Config
from streamrl.learner.trainer import Trainer

STARTED = 2  # steps before the first checkpoint, so that Adam's moments are no longer those of one gradient


def train_on(trainer: Trainer, steps: int) -> list[dict[str, float]]:
    """The metrics of the next steps, but for those that clocks give."""
    rows = []
    for _ in range(steps):
        row = trainer.train_step(make_batch(trainer.version.step) if trainer.rank == 0 else None)
        rows.append({key: row[key] for key in ("grad_norm", "loss/total", "loss/entropy", "lr", "steps/updates")})
    return rows


def start_save_and_go_on(config: Config, run_folder: Path, steps: int) -> dict[str, Any]:
    """Returns the version that began, weights when it saved, metrics of the steps after that, weights at the end."""
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    began = str(trainer.version)
    if trainer.version.step == 0:
        train_on(trainer, STARTED)
    trainer.save()
    trainer.saved(wait=True)
    trainer.export_model()
    saved = weights(trainer)
    rows = train_on(trainer, steps)
    result = {"began": began, "saved": saved, "rows": rows, "weights": weights(trainer)}
    trainer.close()
    return result


def main() -> None:
    config, run_folder, out, steps = sys.argv[1:]
    result = start_save_and_go_on(Config.model_validate_json(Path(config).read_text()), Path(run_folder), int(steps))
    if result["weights"]:  # rank 0 alone exports
        torch.save(result, out)


if __name__ == "__main__":
    main()

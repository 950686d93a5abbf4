"""A learner that halts in the middle of its last save, to be killed: `killed_at_work.py CONFIG.json RUN STAGE`."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import torch
from learner_parts import make_batch, weights
from megatron.core.dist_checkpointing.strategies import filesystem_async

from streamrl.config import Config
from streamrl.learner import checkpoint_saver
from streamrl.learner.trainer import Trainer


def half_removed(path: Path, *_) -> bool:
    """Some files of the checkpoint that is pruned are gone."""
    if path.name != ".step_1.old" or not path.exists():
        return False
    (path / "metadata.json").unlink()
    return True


STAGES = {
    "write": (filesystem_async, "_write_item", lambda *_: True),  # at the first of many tensors
    "index": (checkpoint_saver, "save_config", lambda *_: True),
    "rename": (Path, "rename", lambda path, *_: path.name == ".step_3.saving"),
    "prune": (shutil, "rmtree", lambda path, *_: path.name == ".step_1.old" and path.exists()),
    "remove": (shutil, "rmtree", half_removed),
}


def main() -> None:
    config, run_folder, stage = sys.argv[1:]
    run = Path(run_folder)
    trainer = Trainer(Config.model_validate_json(Path(config).read_text()), run)
    trainer.restore_or_start()
    versions = {}
    for step in range(3):
        trainer.train_step(make_batch(step))
        versions[step + 1] = weights(trainer)
        if step < 2:
            trainer.save()
            trainer.saved(wait=True)
    torch.save(versions, run / "weights.pt")
    halt_at(stage, run)
    trainer.save()
    trainer.saved(wait=True)


def halt_at(stage: str, run: Path) -> None:
    """The call of this stage never returns, and says where the learner is."""
    owner, name, is_it = STAGES[stage]
    original = getattr(owner, name)

    def halt(*arguments, **keywords):
        if is_it(*arguments):
            (run / "reached").touch()
            time.sleep(600)
        return original(*arguments, **keywords)

    setattr(owner, name, halt)


if __name__ == "__main__":
    main()

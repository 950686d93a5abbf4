"""What ranks do for a test of full sharding: `sharded_at_work.py CONFIG.json RUN_FOLDER OUT`.

Train three steps and export. Rank 0 writes to OUT the metrics of the steps and the weights, and of every rank what it
holds between passes (bytes of `weights`, `gradients`, Adam's `moments`; whether `whole` weights are among them) and the
most bytes of float tensors that an export made and held at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from learner_parts import make_batch, weights
from shares_at_work import Memory

from streamrl.config import Config
from streamrl.learner.shared_rows import is_shared_out, local
from streamrl.learner.trainer import Trainer

STEPS = 3
METRICS = ("loss/total", "loss/entropy", "grad_norm", "params_norm", "grad_zeros", "gradient/noise", "gradient/signal")


def held(trainer: Trainer) -> dict[str, Any]:
    """Of this rank."""
    parameters = [each for chunk in trainer._chunks for each in chunk.parameters()]
    optimized = [each for chunk in trainer._wrapped for each in chunk.parameters()]
    states = [state for adam in trainer._optimizer.torch_adams() for state in adam.state.values()]
    return {
        "weights": sum(local(each).nbytes for each in parameters),
        "gradients": sum(each.main_grad.nbytes for each in optimized),
        "moments": sum(state[kind].nbytes for state in states for kind in ("exp_avg", "exp_avg_sq")),
        "whole": not all(is_shared_out(each) for each in parameters),
    }


def exported(trainer: Trainer) -> int:
    """Peak of an export whose tensors nobody keeps."""
    with Memory() as memory:
        for _ in trainer.export():
            continue
    return memory.peak


def main() -> None:
    config, run_folder, out = sys.argv[1:]
    trainer = Trainer(Config.model_validate_json(Path(config).read_text()), Path(run_folder))
    trainer.restore_or_start()
    rows = []
    for step in range(STEPS):
        row = trainer.train_step(make_batch(step, groups=4, longest=40) if trainer.rank == 0 else None)
        rows.append({name: row[name] for name in METRICS if name in row})
    ranks = trainer._ranks.gather({**held(trainer), "exported": exported(trainer)})
    result = {"rows": rows, "ranks": ranks, "weights": weights(trainer)}
    if trainer.rank == 0:
        torch.save(result, out)
    trainer.close()


if __name__ == "__main__":
    main()

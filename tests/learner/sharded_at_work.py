"""What ranks do for a test of full sharding: `sharded_at_work.py CONFIG.json RUN_FOLDER OUT`.

Train three steps and export. Rank 0 writes to OUT the metrics of the steps and the weights, and of every rank what it
holds between passes (bytes of `weights`, `gradients`, Adam's `moments`; whether `whole` weights are among them), the
most bytes of float tensors that an export made and held at a time, and its part of the gradients of `Choice`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from learner_parts import make_batch, weights
from shares_at_work import Memory

from streamrl.config import Config
from streamrl.learner.fully_sharded import FullySharded
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


class Choice(torch.nn.Module):
    """A weight for each rank, of which a rank uses its own: x times it, times the rank and 1."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self._rank = rank
        self.weights = torch.nn.ParameterList([torch.ones(2 * ranks) for _ in range(ranks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + self._rank) * self.weights[self._rank]


def choice(trainer: Trainer) -> list[list[float]]:
    """The gradient of each weight, this rank's rows."""
    ranks = trainer._ranks
    model = Choice(ranks.rank, ranks.world)
    wrapped = FullySharded(model, model, torch.float32, ranks.device, None)
    wrapped(torch.ones(1)).sum().backward()
    wrapped.finish_grad_sync()
    return [shard.main_grad.tolist() for shard in wrapped.parameters()]


def main() -> None:
    config, run_folder, out = sys.argv[1:]
    trainer = Trainer(Config.model_validate_json(Path(config).read_text()), Path(run_folder))
    trainer.restore_or_start()
    rows = []
    for step in range(STEPS):
        row = trainer.train_step(make_batch(step, groups=4, longest=40) if trainer.rank == 0 else None)
        rows.append({name: row[name] for name in METRICS if name in row})
    ranks = trainer._ranks.gather({**held(trainer), "exported": exported(trainer), "choice": choice(trainer)})
    result = {"rows": rows, "ranks": ranks, "weights": weights(trainer)}
    if trainer.rank == 0:
        torch.save(result, out)
    trainer.close()


if __name__ == "__main__":
    main()

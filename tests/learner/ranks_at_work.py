"""What two ranks do for a test: `ranks_at_work.py JOB CONFIG.json RUN_FOLDER OUT`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from learner_parts import branched, gradients, half_kept, make_batch, weights
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import _set_pg_timeout

from streamrl.config import Config
from streamrl.learner import checkpoint, huggingface
from streamrl.learner.attention import describe_row
from streamrl.learner.huggingface import export_weights, load_weights
from streamrl.learner.logprobs import Targets
from streamrl.learner.model import build
from streamrl.learner.parallel import Ranks
from streamrl.learner.shape import read_shape
from streamrl.learner.trainer import Trainer

COLLECTIVE = 10.0  # seconds that a collective of `behind_slow_files` may take


def dp_gradients(config: Config, run_folder: Path) -> Any:
    """Gradients of a batch, and of one so small that the second rank has nothing to do."""
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    result = [gradients(trainer, make_batch()), gradients(trainer, make_batch(groups=1, size=2))]
    metrics = trainer.train_step(make_batch() if trainer.rank == 0 else None)
    trainer.close()
    return result, metrics


def scores(config: Config, run_folder: Path) -> Any:
    """The log-probs of a batch's trained tokens, and those of a batch so small that a rank has none of it."""
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    batches = [make_batch(), make_batch(groups=1, size=2)]
    result = [torch.from_numpy(trainer.score(batch if trainer.rank == 0 else None)) for batch in batches]
    trainer.close()
    return result


def branches(config: Config, run_folder: Path) -> Any:
    """The gradient of a batch with rollouts of several branches, and what the KL takes off their rewards."""
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    found = gradients(trainer, branched(make_batch(size=5), 1, 3, 1))
    taken_off = trainer._step.taken_off
    trainer.close()
    return found, taken_off


def train_three(config: Config, run_folder: Path) -> Any:
    """Start or resume, save, then train three steps: the weights and gradient norms afterwards."""
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    if trainer.version.step == 0:
        for step in range(2):
            trainer.train_step(make_batch(step) if trainer.rank == 0 else None)
        trainer.save()
    began = str(trainer.version)
    norms = []
    for step in range(trainer.version.step, trainer.version.step + 3):
        norms.append(trainer.train_step(make_batch(step) if trainer.rank == 0 else None)["grad_norm"])
    result = {"began": began, "norms": norms, "weights": weights(trainer)}
    trainer.close()
    return result


def save_two(config: Config, run_folder: Path) -> Any:
    """Train two steps with a checkpoint of each: their weights, by step."""
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    kept = {}
    for step in range(2):
        trainer.train_step(make_batch(step) if trainer.rank == 0 else None)
        trainer.save()
        trainer.saved(wait=True)
        kept[step + 1] = weights(trainer)
    trainer.close()
    return kept


def resume(config: Config, run_folder: Path) -> Any:
    """What a resume begins with."""
    trainer = Trainer(config, run_folder)
    trainer.restore_or_start()
    result = {"version": str(trainer.version), "weights": weights(trainer)}
    trainer.close()
    return result


def behind_slow_files(config: Config, run_folder: Path) -> Any:
    """What a resume begins with and the model that it writes, where rank 0 is longer at files than a collective may
    take: the version, and whether there is a model."""
    trainer = Trainer(config, run_folder)
    _set_pg_timeout(timedelta(seconds=COLLECTIVE), trainer._ranks.control)
    if trainer.rank == 0:
        checkpoint.damage = slowly(checkpoint.damage)
        huggingface.save_file = slowly(huggingface.save_file)
    trainer.restore_or_start()
    trainer.export_model()
    assert trainer.broadcast("end" if trainer.rank == 0 else None) == "end"
    trainer.close()
    return {"version": str(trainer.version), "model": (run_folder / "model" / "model.safetensors").is_file()}


def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, later than the other ranks wait in a collective."""

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1.2 * COLLECTIVE)
        return function(*args, **kwargs)

    return late


def tensor_parallel(config: Config, run_folder: Path) -> Any:
    """The exported weights of a model cut over two ranks, log-probs of some tokens, and a weight's gradient."""
    ranks = Ranks.start(config)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    (model,) = build(read_shape(config.model.path), config, ranks.device)
    load_weights([model], config.model.path)
    row = torch.arange(12)
    targets = Targets(row[:-1], row[1:], temperature=0.8, entropy_gradient=True, kept=half_kept(row[1:]))
    packed = describe_row(torch.tensor([[0, 12, 0, 0]]).numpy(), ranks.device.torch_device)
    logprobs, entropy = model(row[None], row[None], None, labels=targets, packed_seq_params=packed)
    (logprobs.sum() + entropy.sum()).backward()
    result = {
        "weights": {name: tensor.clone() for name, tensor in export_weights([model])},
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "norm_grad": model.decoder.final_layernorm.weight.grad,
    }
    ranks.stop()
    return result


JOBS = {
    job.__name__: job
    for job in (
        dp_gradients, scores, branches, train_three, save_two, resume, behind_slow_files, tensor_parallel,
    )
}  # fmt: skip


def main() -> None:
    job, config, run_folder, out = sys.argv[1:]
    result = JOBS[job](Config.model_validate_json(Path(config).read_text()), Path(run_folder))
    if torch.distributed.is_initialized():
        raise RuntimeError("the ranks were not stopped")
    if int(os.environ["RANK"]) == 0:
        torch.save(result, out)


if __name__ == "__main__":
    main()

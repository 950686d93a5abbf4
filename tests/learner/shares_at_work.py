"""What ranks do for a test of who saves what: `shares_at_work.py CONFIG.json RUN_FOLDER OUT`.

Train two steps and save; save again as Megatron itself describes the distributed optimizer; train two more. Rank 0
writes to OUT, of every rank, the bytes of tensors in its file (`written`) and the most bytes of float tensors that the
first save made and held at a time (`peak`) and the second (`megatron`), and the weights in the end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from checkpoint_bytes import bytes_of_files
from learner_parts import make_batch, weights
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamrl.config import Config
from streamrl.learner import checkpoint_optimizer
from streamrl.learner.trainer import Trainer


class Memory(TorchDispatchMode):
    """Counts the bytes of float tensors that are made inside and are still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and _address(tensor) not in given:
                storage = tensor.untyped_storage()
                self._made.setdefault(storage.data_ptr(), (StorageWeakRef(storage), storage.nbytes()))
        self._made = {key: value for key, value in self._made.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return result


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def save(trainer: Trainer) -> int:
    """The peak of one save, until its file is written."""
    with Memory() as memory:
        trainer.save()
    trainer.saved(wait=True)
    return memory.peak


def main() -> None:
    config, run_folder, out = sys.argv[1:]
    trainer = Trainer(Config.model_validate_json(Path(config).read_text()), Path(run_folder))
    trainer.restore_or_start()
    for step in range(2):
        trainer.train_step(make_batch(step) if trainer.rank == 0 else None)
    peak = save(trainer)
    written = bytes_of_files(Path(run_folder, "checkpoints", "step_2"))[f"__{trainer.rank}_0.distcp"]
    trainer._ranks.barrier()  # all have read it
    for part in trainer._optimizer.megatron.chained_optimizers:
        if isinstance(part, DistributedOptimizer):  # methods of the class, in place of those of `install`
            del part.sharded_param_state_fully_reshardable
    checkpoint_optimizer.install = lambda optimizer: None
    found = trainer._ranks.gather({"written": written, "peak": peak, "megatron": save(trainer)})
    for step in (2, 3):
        trainer.train_step(make_batch(step) if trainer.rank == 0 else None)
    result = {"ranks": found, "weights": weights(trainer)}
    if trainer.rank == 0:
        torch.save(result, out)
    trainer.close()


if __name__ == "__main__":
    main()

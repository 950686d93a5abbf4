"""Checkpoints by Megatron's dist_checkpointing: everything that the next step of the learner depends on.

    checkpoints/.step_20.saving ──rename──▶ checkpoints/step_20 (checkpoint.json + Megatron's files)

A folder named `step_N` is complete. It resumes bit for bit in the layout that wrote it. Its ledger names the
groups that are in its weights: which data has been trained is what the checkpoint says, not what was delivered.
"""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import MegatronModule

from streamrl.config_file import ConfigError
from streamrl.learner.optimizer import PolicyOptimizer
from streamrl.learner.parallel import Ranks
from streamrl.types import Ledger, PolicyVersion

FORMAT = 2

_DESCRIPTION = "checkpoint.json"
_NAME = re.compile(r"step_\d+")


class CheckpointMismatchError(ConfigError):
    """A checkpoint was written by another layout; the text names the first difference."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint folder and what its description says."""

    folder: Path
    version: PolicyVersion
    layout: dict[str, Any]
    ledger: Ledger | None  # None where the batches came from a record


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint is written from and read into."""

    model: MegatronModule  # without the data-parallel wrapper
    optimizer: PolicyOptimizer
    ranks: Ranks
    layout: dict[str, Any]  # what a run that resumes must share


def latest(root: Path) -> Checkpoint | None:
    """The checkpoint with the most steps in `root` (RUN/checkpoints); None when there is none."""
    folders = _complete(root)
    if not folders:
        return None
    description = json.loads((folders[-1] / _DESCRIPTION).read_text())
    if description["format"] != FORMAT:
        raise CheckpointMismatchError(f"{folders[-1]} has format {description['format']}, this streamrl reads {FORMAT}")
    ledger = description["ledger"]
    return Checkpoint(
        folders[-1],
        PolicyVersion.parse(description["version"]),
        description["layout"],
        None if ledger is None else msgspec.convert(ledger, Ledger, str_keys=True),
    )


def oldest_step(root: Path) -> int | None:
    """The step of the oldest checkpoint in `root`; None when there is none."""
    folders = _complete(root)
    return _step(folders[0]) if folders else None


def next_incarnation(root: Path, ranks: Ranks) -> int:
    """Count a start of the learner: 0 at the first, one more at each later one. All ranks call.

    The count is on disk before any step of the incarnation, so that two starts from one checkpoint differ too.
    """
    incarnation = 0
    if ranks.rank == 0:
        root.mkdir(parents=True, exist_ok=True)
        path = root / "incarnation"
        incarnation = int(path.read_text()) + 1 if path.exists() else 0
        _write_durably(path, str(incarnation))
    return int(ranks.broadcast(incarnation))


def save(root: Path, version: PolicyVersion, state: State, keep: int, ledger: Ledger | None = None) -> Path:
    """Write `root/step_N` and delete all but the newest `keep`. All ranks call and return together.

    `ledger` is rank 0's: which groups are in the weights.
    """
    target = root / f"step_{version.step}"
    partial = root / f".{target.name}.saving"
    if state.ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    state.ranks.barrier()
    optimizer = state.optimizer
    optimizer.fill_state()
    sharded = _sharded(state, loading=False)
    sharded["common"] = {
        "scheduler": optimizer.scheduler.state_dict(),
        "updates": optimizer.updates,
        "skipped": optimizer.skipped,
    }
    # A plain queue, because writing is waited for here. Megatron's own is a server process, which would
    # outlive a rank that is killed.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(sharded, str(partial), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))
    if state.ranks.rank == 0:
        description = {"format": FORMAT, "version": str(version), "layout": state.layout, "ledger": ledger}
        _write_durably(partial / _DESCRIPTION, msgspec.json.format(msgspec.json.encode(description)).decode())
        _replace(target, partial)
        for folder in _complete(root)[:-keep]:
            shutil.rmtree(folder)
    state.ranks.barrier()
    return target


def load(checkpoint: Checkpoint, state: State) -> None:
    """Set model, optimizer, schedule and random state from a checkpoint. All ranks call.

    Raises CheckpointMismatchError when it was written by another layout.
    """
    for key in sorted(state.layout.keys() | checkpoint.layout.keys()):
        theirs, ours = checkpoint.layout.get(key), state.layout.get(key)
        if theirs != ours:
            raise CheckpointMismatchError(
                f"{checkpoint.folder} was written with {key}={theirs}, this run has {key}={ours}: "
                "resume with the layout that wrote it, or start a new run from an exported model"
            )
    _mend_distributed_optimizer()
    optimizer = state.optimizer
    optimizer.fill_state()
    loaded = dist_checkpointing.load(_sharded(state, loading=True), str(checkpoint.folder))
    state.model.load_state_dict(loaded["model"])
    optimizer.megatron.load_state_dict(_with_step(loaded["optimizer"], optimizer))
    optimizer.own_steps()
    optimizer.scheduler.load_state_dict(loaded["common"]["scheduler"])
    optimizer.apply_settings()
    optimizer.updates = loaded["common"]["updates"]
    optimizer.skipped = loaded["common"]["skipped"]
    _set_random_state(loaded["random"])


def _sharded(state: State, loading: bool) -> dict[str, Any]:
    """What dist_checkpointing saves and loads, described shard by shard."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    weights = state.model.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "optimizer": state.optimizer.megatron.sharded_state_dict(weights, is_loading=loading, metadata=metadata),
        "random": ShardedObject("random", _random_state(), (state.ranks.world,), (state.ranks.rank,)),
    }


def _with_step(state: dict[str, Any], optimizer: PolicyOptimizer) -> dict[str, Any]:
    """Megatron saves no `step` of 0, and torch's Adam does not load without one."""
    inner = state.get("optimizer", state)
    if optimizer.torch_adams() and "state" in inner:
        inner["state"].setdefault("common_step", torch.zeros(()))
    return state


def _random_state() -> dict[str, Any]:
    """The generators of this rank: host, device, and those of Megatron's parallel regions."""
    state = {"host": torch.get_rng_state(), "regions": tensor_parallel.get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["device"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["host"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["regions"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"])


def _mend_distributed_optimizer() -> None:
    """Let the distributed optimizer load into torch's Adam, whose state has a `step` that Megatron does not save."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(original, "knows_step", False):
        return

    def with_step(self: DistributedOptimizer, model_param: torch.nn.Parameter, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        own = {"step": state["step"]} if "step" in state else {}
        original(self, model_param, own | tensors)

    with_step.knows_step = True  # type: ignore[attr-defined]
    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def _complete(root: Path) -> list[Path]:
    """The complete checkpoints of `root`, oldest first."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=_step)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _replace(target: Path, partial: Path) -> None:
    """Rename `partial` to `target`; an older folder of that name goes away without a moment of half a one."""
    for path in partial.rglob("*"):
        _sync(path)
    _sync(partial)
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write_durably(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    _sync(partial)
    partial.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

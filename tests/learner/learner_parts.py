"""Tiny random models, configurations and batches, for the learner's tests and for the ranks that they start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from benchmarks.random_models import VOCABULARY, largest_difference, make_batch, write_model
from streamrl.config import Config
from streamrl.learner.kept import Kept
from streamrl.learner.trainer import Trainer
from streamrl.sampling_columns import KeptSets
from streamrl.types import Batch

__all__ = [
    "VOCABULARY",
    "branched",
    "gradients",
    "half_kept",
    "largest_difference",
    "make_batch",
    "make_config",
    "weights",
    "write_model",
]


def make_config(model: Path, dtype: str = "float32", optimizer: dict[str, Any] | None = None, **learner: Any) -> Config:
    """A configuration for a tiny model; further keyword arguments go into the learner section."""
    return Config.model_validate(
        {
            "model": {"path": model, "dtype": dtype},
            "generate": {"sampling": {"temperature": 0.8}},
            "algo": {"entropy": 0.01},
            "learner": {"optimizer": {"lr": 1e-2, **(optimizer or {})}, **learner},
            "checkpoint": {"keep": 2},
        }
    )


def gradients(trainer: Trainer, batch: Batch) -> dict[str, torch.Tensor]:
    """The gradient of a step's loss on this batch, by parameter, summed over ranks, without an update."""
    share = trainer._ranks.scatter(trainer._shares(batch) if trainer.rank == 0 else None)
    step = trainer._step
    step.differentiate(share.mini_batches[0], step.signals(share)[0])
    return {name: p.main_grad.clone() for name, p in trainer._chunks[0].named_parameters()}


def branched(batch: Batch, *branches: int) -> Batch:
    """The same samples as rollouts of so many branches; each has the reward of its rollout's last one."""
    groups = []
    for group in batch.groups:
        rollouts = msgspec.structs.replace(group, branches=branches).rollouts
        samples = tuple(
            msgspec.structs.replace(sample, reward=rollout[-1].reward) for rollout in rollouts for sample in rollout
        )
        groups.append(msgspec.structs.replace(group, samples=samples, branches=branches))
    return msgspec.structs.replace(batch, groups=tuple(groups))


def half_kept(tokens: torch.Tensor) -> Kept | None:
    """Every second token was drawn from a set of its own, with tokens of both halves of the vocabulary."""
    sets = [sorted({int(token), *range(place, VOCABULARY, 5)}) for place, token in enumerate(tokens)]
    sets = [each if place % 2 else [] for place, each in enumerate(sets)]
    counts = np.array([len(each) for each in sets])
    return Kept.of(KeptSets(counts, np.array([token for each in sets for token in each])), tokens.device)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """A copy of what the trainer exports."""
    return {name: tensor.clone() for name, tensor in trainer.export()}

"""A learner's rank on a CPU whose model has the layers, and Megatron the optimizer, that it would have on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faked_engine
import numpy as np
import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from benchmarks.random_models import make_batch
from streamrl.config import Config
from streamrl.device import Device
from streamrl.learner import lora, model
from streamrl.learner.checkpoint import State
from streamrl.learner.forward import wrap
from streamrl.learner.huggingface import load_weights
from streamrl.learner.model import LayerChoice, PolicyModel, build, choose_layers
from streamrl.learner.optimizer import PolicyOptimizer
from streamrl.learner.packing import Packing, plan_batch
from streamrl.learner.parallel import Ranks
from streamrl.learner.rows import RowMaker
from streamrl.learner.shape import read_shape
from streamrl.types import Batch

BUDGET = 64  # tokens of a row


@dataclass(frozen=True, slots=True)
class EngineLearner:
    """One rank, with the distributed optimizer."""

    config: Config
    ranks: Ranks
    model: PolicyModel

    @classmethod
    @contextlib.contextmanager
    def started(
        cls,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        engine: bool = True,
        dtype: str = "bfloat16",
        **settings: Any,
    ) -> Iterator[EngineLearner]:
        """`settings` of the learner section. engine: False makes the local layers instead."""
        config = Config.model_validate(
            {
                "model": {"path": folder, "dtype": dtype},
                "learner": {"optimizer": {"lr": 1e-2, "distributed": True}, **settings},
            }
        )
        ranks = Ranks.start(config)
        faked_engine.keep_on_cpu()
        with monkeypatch.context() as patched:
            if engine:
                patched.setattr(model, "choose_layers", _as_on_a_gpu)
            try:
                (made,) = build(read_shape(folder), config, ranks.device)
                yield cls(config, ranks, made)
            finally:
                ranks.stop()

    def log_probs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """float32 [N] log-probs and entropies of the trained tokens of `batch`, in its order, with gradient.

        Of all on each context-parallel rank; with one data-parallel rank.
        """
        maker = RowMaker.of_model(self.model, self.config, torch.device("cpu"))
        packing = Packing(
            ranks=1, budget=BUDGET, share_prompts=False, sequence_multiple=maker.sequence_multiple, routing=None
        )
        (micro_batches,) = plan_batch(batch, [0.0] * len(batch.samples), packing)
        assert len(micro_batches) > 1
        found, longest = [], maker.length(micro_batches)
        for micro in micro_batches:
            row = maker.make(micro, longest)
            found.append(self.model(row.ids, row.positions, None, labels=row.targets, packed_seq_params=row.packed))
        order = torch.argsort(torch.from_numpy(np.concatenate([micro.place for micro in micro_batches])))
        log_probs, entropies = (torch.cat(parts)[order] for parts in zip(*found, strict=True))
        return log_probs, entropies

    def optimized(self) -> tuple[PolicyOptimizer, list[DistributedDataParallel], State]:
        """The optimizer that Megatron makes, the model in its wrapper, and what a checkpoint is made of."""
        if self.config.learner.lora.rank:
            lora.freeze([self.model])
        wrapped = wrap([self.model], self.config, self.ranks)
        optimizer = PolicyOptimizer(wrapped, self.config.learner.optimizer, torch.bfloat16, 10, 3)
        return optimizer, wrapped, State([self.model], optimizer, self.ranks, {})


def log_probs_and_gradients(made: EngineLearner) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs and entropies of a batch, and the gradients of their sum by parameter, with random adapters."""
    chunks = [made.model]
    load_weights(chunks, made.config.model.path)
    lora.draw(chunks, seed=1)
    if made.config.learner.lora.rank:
        lora.freeze(chunks)
        with torch.no_grad():
            for _, module in lora.adapters(chunks):
                module.lora_b.copy_(0.1 * torch.randn(module.lora_b.shape, generator=torch.Generator().manual_seed(2)))
    log_probs, entropies = made.log_probs(make_batch())
    (log_probs.sum() + 0.1 * entropies.sum()).backward()
    gradients = {name: each.grad for name, each in made.model.named_parameters() if each.grad is not None}
    return log_probs.detach(), entropies.detach(), gradients


def _as_on_a_gpu(device: Device, dtype: torch.dtype) -> LayerChoice:
    """What is chosen for bfloat16, also for a model that computes in float32, so that numbers can be compared."""
    return choose_layers(Device("cuda", 0), torch.bfloat16)

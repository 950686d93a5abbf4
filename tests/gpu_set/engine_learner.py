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
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from benchmarks.random_models import make_batch
from streamrl.config import Config
from streamrl.device import Device
from streamrl.learner import lora, lora_folder, model
from streamrl.learner.checkpoint import State
from streamrl.learner.forward import wrap
from streamrl.learner.huggingface import export_weights, load_weights
from streamrl.learner.model import LayerChoice, PolicyModel, build, choose_layers
from streamrl.learner.optimizer import PolicyOptimizer
from streamrl.learner.packing import Packing, plan_batch
from streamrl.learner.parallel import Ranks
from streamrl.learner.rows import RowMaker
from streamrl.learner.shape import read_shape
from streamrl.publish.peft import write_adapter
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
    """Log-probs and entropies of a batch, and the gradients of their sum, which take the place of the weights.

    Adapters are those of `learner.lora.adapter`. Gradients have Hugging Face's or PEFT's names, on the first rank.
    """
    chunks = [made.model]
    load_weights(chunks, made.config.model.path)
    if made.config.learner.lora.rank:
        lora.freeze(chunks)
        lora_folder.start(chunks, made.config)
    log_probs, entropies = made.log_probs(make_batch())
    (log_probs.sum() + 0.1 * entropies.sum()).backward()
    return log_probs.detach(), entropies.detach(), _gradients(made)


def write_random_adapters(made: EngineLearner, folder: Path) -> Path:
    """A PEFT folder with random matrices for this model. Returns `folder`."""
    torch.manual_seed(1)
    fresh = sorted(lora_folder.export_adapters([made.model]))
    random = [(name, 0.1 * torch.randn_like(tensor)) for name, tensor in fresh]
    write_adapter(folder, random, made.config.learner.lora, made.config.model.path)
    return folder


def _gradients(made: EngineLearner) -> dict[str, Tensor]:
    """The gradients of the whole model, of one data-parallel rank, under Hugging Face's and PEFT's names."""
    trained = {name: each for name, each in made.model.named_parameters() if each.requires_grad}
    groups = made.model.pg_collection
    for each in trained.values():
        gradient = torch.zeros_like(each) if each.grad is None else each.grad
        if getattr(each, "sequence_parallel", False):  # each rank had some of the tokens
            dist.all_reduce(gradient, group=groups.tp)
        dist.all_reduce(gradient, group=groups.cp)
        each.data = gradient
    if made.config.learner.lora.rank:
        return {name: tensor.clone() for name, tensor in lora_folder.export_adapters([made.model])}
    return {name: tensor.clone() for name, tensor in export_weights([made.model])}


def _as_on_a_gpu(device: Device, dtype: torch.dtype) -> LayerChoice:
    """What is chosen for bfloat16, also for a model that computes in float32, so that numbers can be compared."""
    return choose_layers(Device("cuda", 0), torch.bfloat16)

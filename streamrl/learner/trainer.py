"""The learner's step: one batch in, one policy version out, on every rank.

    rank 0: batch ──advantages, plan──▶ a share for each data-parallel rank
    every rank: share ──forward, loss, backward──▶ gradients, summed over ranks ──update──▶ next version

The loss of a micro batch is divided by the counts of the whole step before its backward pass, so that
neither packing, nor the split into micro batches, nor the number of ranks changes the gradient.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from streamrl.algo.advantages import group_advantages
from streamrl.algo.diagnostics import finish, merge
from streamrl.algo.losses import Denominators, TokenBatch, policy_loss
from streamrl.config import Config
from streamrl.config_learner import AdvantageConfig
from streamrl.learner import checkpoint
from streamrl.learner.attention import describe_row, describe_row_for_engine
from streamrl.learner.huggingface import export_weights, load_weights
from streamrl.learner.logprobs import Targets
from streamrl.learner.model import PolicyModel, build, choose_layers
from streamrl.learner.optimizer import PolicyOptimizer
from streamrl.learner.packing import MicroBatch, plan_batch
from streamrl.learner.parallel import Ranks
from streamrl.learner.shape import read_shape
from streamrl.types import Batch, Ledger, PolicyVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Share:
    """What one data-parallel rank trains in a step, as rank 0 sends it."""

    micro_batches: list[MicroBatch]
    denominators: Denominators


class Trainer:
    """The model of this rank and everything that changes it.

        trainer = Trainer(config, run_folder)
        trainer.restore_or_start()
        metrics = trainer.train_step(batch)  # rank 0; the other ranks pass None

    All methods but `version` and `rank` are collective: every rank calls them in the same order.
    """

    def __init__(self, config: Config, run_folder: Path) -> None:
        """Join the ranks and build the model, without weights yet.

        Raises UnsupportedModelError, UnsupportedAcceleratorError, and ValueError for a wrong number of ranks.
        """
        shape = read_shape(config.model.path)
        self._config = config
        self._checkpoints = run_folder / "checkpoints"
        self._ranks = Ranks.start(config)
        self._device = self._ranks.device
        dtype = getattr(torch, config.model.dtype)
        layers = choose_layers(self._device, dtype)
        log.info("%s on %s", layers, self._device)
        self._layers = layers.kind
        self._model: PolicyModel = build(shape, dtype, self._device)
        self._ddp = self._wrap(dtype)
        self._optimizer = PolicyOptimizer(self._ddp, config.learner.optimizer, dtype, config.run.steps)
        self._version = PolicyVersion(0)
        self.ledger: Ledger | None = None  # of the checkpoint that was restored

    @property
    def rank(self) -> int:
        return self._ranks.rank

    @property
    def version(self) -> PolicyVersion:
        """The policy that the weights are: the next batch is the one of step `version.step`."""
        return self._version

    def restore_or_start(self) -> None:
        """Take up the newest checkpoint of the run, or else the Hugging Face weights as step 0.

        The first start of a run has incarnation 0; every later one has an incarnation of its own.
        """
        incarnation = checkpoint.next_incarnation(self._checkpoints, self._ranks)
        found = checkpoint.latest(self._checkpoints)
        if found is None:
            load_weights(self._model, self._config.model.path)
            self._optimizer.megatron.reload_model_params()
            self._version = PolicyVersion(0, incarnation)
        else:
            checkpoint.load(found, self._state())
            self._version = PolicyVersion(found.version.step, max(incarnation, found.version.incarnation + 1))
            self.ledger = found.ledger
        log.info("starting as version %s from %s", self._version, found.folder if found else self._config.model.path)

    def train_step(self, batch: Batch | None) -> dict[str, float]:
        """Train on the batch of step `version.step`; rank 0 passes it, the others None.

        Returns the metrics of the step, reduced over ranks, the same on every rank. A step whose gradient is
        not finite changes no weight; it counts as a step and in `steps/skipped`.
        Raises ValueError for the batch of another step, SequenceTooLongError for one that cannot be packed.
        """
        share: Share = self._ranks.scatter(self._shares(batch) if self.rank == 0 else None)
        began = time.perf_counter()
        sums = self._forward_backward(share)
        self._device.synchronize()
        differentiated = time.perf_counter()
        update = self._optimizer.update()
        self._device.synchronize()
        ended = time.perf_counter()
        if not update.successful:
            log.warning("step %d: gradient norm %s, update skipped", self._version.step, update.grad_norm)
        self._version = PolicyVersion(self._version.step + 1, self._version.incarnation)
        return {
            **finish(sums),
            **self._device.memory(),
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            "steps/updates": self._optimizer.updates,
            "steps/skipped": self._optimizer.skipped,
            "micro_batches": len(share.micro_batches),
            "time/forward_backward": differentiated - began,
            "time/optimizer": ended - differentiated,
        }

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as (Hugging Face name, CPU tensor in the model's dtype).

        On a CPU machine a tensor may share memory with the model: use or copy it before the next step.
        """
        for name, tensor in export_weights(self._model):
            yield name, tensor.cpu()

    def save(self, ledger: Ledger | None = None) -> Path:
        """Write the checkpoint of this version, on rank 0 with the groups that it contains. Returns its folder."""
        keep = self._config.checkpoint.keep
        return checkpoint.save(self._checkpoints, self._version, self._state(), keep, ledger)

    @property
    def oldest_checkpoint(self) -> int | None:
        """The step of the oldest checkpoint that is kept; None when there is none."""
        return checkpoint.oldest_step(self._checkpoints)

    def broadcast(self, value: Any) -> Any:
        """A small object of rank 0, on every rank."""
        return self._ranks.broadcast(value)

    def close(self) -> None:
        """Leave the process groups."""
        self._ranks.stop()

    def _wrap(self, dtype: torch.dtype) -> DistributedDataParallel:
        """Megatron's mixed precision and data parallelism around the model."""
        chosen = self._config.learner.optimizer.distributed
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self._device.distributed_optimizer if chosen is None else chosen,
        )
        config = self._model.config
        module = Float16Module(config, self._model) if dtype == torch.bfloat16 else self._model
        ddp = DistributedDataParallel(config, ddp_config, module)
        config.finalize_model_grads_func = _finalize
        return ddp

    def _state(self) -> checkpoint.State:
        layout = {
            **self._ranks.layout,
            "dtype": self._config.model.dtype,
            "distributed_optimizer": self._ddp.ddp_config.use_distributed_optimizer,
        }
        return checkpoint.State(self._ddp.module, self._optimizer, self._ranks, layout)

    def _shares(self, batch: Batch | None) -> list[Share]:
        if batch is None or batch.step != self._version.step:
            given = None if batch is None else batch.step
            raise ValueError(f"version {self._version} trains the batch of step {self._version.step}, not of {given}")
        advantages = batch_advantages(batch, self._config.algo.advantage)
        denominators = Denominators.of(sample.loss_mask for sample in batch.samples)
        ranks = parallel_state.get_data_parallel_world_size()
        learner = self._config.learner
        share_prompts = learner.share_prompts and self._layers == "local"
        planned = plan_batch(batch, advantages, ranks, learner.tokens_per_micro_batch, share_prompts)
        return [Share(micro_batches, denominators) for micro_batches in planned]

    def _forward_backward(self, share: Share) -> dict[str, Tensor]:
        """Gradients of the whole step into the buffers; returns the diagnostic sums over micro batches and ranks."""
        self._ddp.zero_grad_buffer()
        self._optimizer.megatron.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=partial(self._forward, denominators=share.denominators),
            data_iterator=iter(share.micro_batches),
            model=[self._ddp],
            num_microbatches=len(share.micro_batches),
            seq_length=self._config.learner.tokens_per_micro_batch,
            micro_batch_size=1,
            forward_only=False,
        )
        return _reduce(merge(parts))

    def _forward(
        self, micro_batches: Iterator[MicroBatch], model: torch.nn.Module, denominators: Denominators
    ) -> tuple[tuple[Tensor, Tensor], Any]:
        """Megatron's forward step: (log-probs, entropies) of a micro batch, and the function that makes its loss."""
        micro = next(micro_batches)
        device = self._device.torch_device
        ids, positions = (torch.from_numpy(x)[None].to(device) for x in (micro.ids, micro.positions))
        targets = Targets(
            torch.from_numpy(micro.targets).to(device),
            torch.from_numpy(micro.tokens).to(device),
            self._config.generate.sampling.temperature,
            entropy_gradient=self._config.algo.entropy > 0,
        )
        describe = describe_row if self._layers == "local" else describe_row_for_engine
        row = describe(micro.segments, device)
        output = model(ids, positions, None, labels=targets, packed_seq_params=row)
        return output, partial(self._loss, micro=micro, denominators=denominators)

    def _loss(
        self, output: tuple[Tensor, Tensor], micro: MicroBatch, denominators: Denominators
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs, entropy = output

        def on_device(array: Any) -> Tensor:
            return torch.from_numpy(array).to(logprobs.device)

        tokens = TokenBatch(
            logprobs=logprobs,
            entropy=entropy,
            behaviour=on_device(micro.behaviour),
            advantages=on_device(micro.advantages),
            mask=torch.ones_like(logprobs, dtype=torch.bool),
            staleness=on_device(micro.staleness),
            sample=on_device(micro.sample),
            samples=micro.samples,
        )
        loss, sums = policy_loss(tokens, self._config.algo, denominators)
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), sums


def batch_advantages(batch: Batch, config: AdvantageConfig) -> list[float]:
    """The group-relative advantage of every sample of a batch, in its order; 0 for placeholders."""
    advantages: list[float] = []
    for group in batch.groups:
        rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
        valid = torch.tensor([not sample.is_placeholder for sample in group.samples])
        advantages += group_advantages(rewards, valid, config).tolist()
    return advantages


def _finalize(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Sum the gradients over ranks, without dividing by a token count: the loss is divided already."""
    finalize_model_grads(model, None, **groups)


def _reduce(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Diagnostic sums over the data-parallel ranks: `max/...` by their largest, the others added."""
    group = parallel_state.get_data_parallel_group()
    reduced = dict(sums)
    for keys, operation in (
        ([key for key in sums if not key.startswith("max/")], dist.ReduceOp.SUM),
        ([key for key in sums if key.startswith("max/")], dist.ReduceOp.MAX),
    ):
        if not keys:
            continue
        stacked = torch.stack([sums[key] for key in keys])
        dist.all_reduce(stacked, operation, group=group)
        reduced |= dict(zip(keys, stacked, strict=True))
    return reduced

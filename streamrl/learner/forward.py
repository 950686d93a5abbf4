"""Forward and backward passes over packed micro batches, through Megatron's schedules, in every layout.

    micro batches ──model chunks of this rank──▶ log-probs ──loss──▶ gradients, finalised over all ranks
    micro batches ──model chunks of this rank──▶ log-probs, on the last pipeline stage, without a gradient

What a rank takes of each micro batch is made in `rows.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from streamrl.algo.diagnostics import MAX, merge
from streamrl.config import Config
from streamrl.learner import sigmoid_router
from streamrl.learner.blame import DATA_ERRORS, MicroBatchFailed
from streamrl.learner.full_kl import ReferenceStates
from streamrl.learner.fully_sharded import FullySharded, is_fully_sharded
from streamrl.learner.megatron_fields import values_of
from streamrl.learner.model import PolicyModel, policy_of
from streamrl.learner.packing import MicroBatch
from streamrl.learner.parallel import Ranks, from_last_stage
from streamrl.learner.rows import RowMaker
from streamrl.learner.stopwatch import Stopwatch

# (log-probs [N], entropies [N], index of the micro batch) -> (its part of the step's loss, its sums). With a reference
# there is a fourth argument: divergences [N].
Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]

# Data parallelism around a model chunk.
Wrapped: TypeAlias = DistributedDataParallel | FullySharded


def wrap(chunks: Sequence[PolicyModel], config: Config, ranks: Ranks) -> list[Wrapped]:
    """Megatron's mixed precision and data parallelism around each model chunk, gradients reduced in float32
    unless `learner.megatron` says otherwise.

    With `learner.overlap` gradients are reduced while the backward pass still runs. The distributed optimizer's
    parameters are gathered with each update: during the next forward pass, as Megatron could, it would wait only for
    modules that are called, and the output layer's weight, among others, is read without a call. With
    `learner.layout.sharding: full` it is torch's data parallelism, and the values of the chunks must not be set yet.
    """
    if config.learner.layout.fully_sharded:
        dtype = getattr(torch, config.model.dtype)
        return [FullySharded(in_dtype(chunk), chunk, dtype, ranks.device, chunk.config) for chunk in chunks]
    distributed, overlap = config.learner.optimizer.distributed, config.learner.overlap
    distributed = ranks.device.distributed_optimizer if distributed is None else distributed
    overlap = ranks.device.kind == "cuda" and chunks[0].overlaps if overlap is None else overlap
    fields: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": distributed,
        "overlap_grad_reduce": overlap,
        **values_of(config.learner.megatron, "DistributedDataParallelConfig"),
    }
    wrapped: list[Wrapped] = []
    for index, chunk in enumerate(chunks):
        ddp_config = DistributedDataParallelConfig(**fields)
        module = in_dtype(chunk)
        # Only the first chunk's gradients come last in the backward pass, so the others are cut into no buckets.
        wrapped.append(DistributedDataParallel(chunk.config, ddp_config, module, disable_bucketing=index > 0))
    if overlap:
        contexts = [chunk.no_sync for chunk in wrapped]
        chunks[0].config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
    return wrapped


def in_dtype(chunk: PolicyModel) -> torch.nn.Module:
    """A model chunk that takes and gives float32, whatever the dtype of its weights."""
    if not chunk.config.bf16:
        return chunk
    with sigmoid_router.biases_kept(chunk):
        return Float16Module(chunk.config, chunk)


def shares_optimizer(wrapped: Wrapped) -> bool:
    """Has each rank a part of the optimizer's state alone?"""
    return isinstance(wrapped, FullySharded) or bool(wrapped.ddp_config.use_distributed_optimizer)


class Passes:
    """Runs the micro batches of a step through this rank's model chunks.

    Every method is collective: all ranks call it, each with as many micro batches as the others. The ranks
    that share a data-parallel rank give the same micro batches.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], ranks: Ranks, config: Config) -> None:
        """`chunks`: of this rank, wrapped as `wrap` does, or `in_dtype` alone for a model that only scores."""
        self._chunks = list(chunks)
        self._ranks = ranks
        self.model = model = policy_of(chunks[0])  # the first chunk
        model.config.finalize_model_grads_func = self._finalize
        self._rows = RowMaker.of_model(model, config, ranks.device.torch_device)
        self._references: Sequence[ReferenceStates | None] = ()
        self._began = 0.0
        self._stopwatch = Stopwatch(ranks.device)
        self.busy = 0.0  # seconds of the last `forward_backward`, without the reduction of gradients over ranks
        self.forward = 0.0  # those of them in this rank's forward passes and the loss

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: Loss,
        references: Sequence[ReferenceStates | None] = (),
    ) -> dict[str, Tensor]:
        """Put the gradient of these micro batches' loss into the buffers, which are emptied first.

        `loss` is called on the ranks of the last pipeline stage; parts are added, so each is divided by the
        counts of the whole update. Returns the loss's sums over micro batches and data-parallel ranks
        (`max/...`: the largest), the same on every rank. references: of each micro batch, where the loss has the
        divergence over the whole vocabulary. Raises ValueError without a micro batch.
        """
        self._began = time.perf_counter()
        for chunk in self._chunks:
            assert isinstance(chunk, Wrapped), "a model that only scores has no gradients"
            chunk.zero_grad_buffer()
        self._references = references
        try:
            sums = self._run(micro_batches, partial(self._part, loss), forward_only=False)
        finally:
            self._references = ()
        return self._reduced(merge(sums))

    def score(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """The log-probs float32 [N] of each micro batch's targets under the present weights, without a gradient.

        On the ranks of the last pipeline stage; elsewhere the tensors are empty. Nothing is dropped out.
        """
        with torch.no_grad(), self._evaluating():
            return self._scores(micro_batches)

    def score_with_states(self, micro_batches: Sequence[MicroBatch]) -> tuple[list[Tensor], list[ReferenceStates]]:
        """As `score`, with what the divergence over the whole vocabulary needs; nothing but on the last stage."""
        states: list[ReferenceStates] = []
        last = policy_of(self._chunks[-1])
        last.states = states
        try:
            with torch.no_grad(), self._evaluating():
                scores = self._scores(micro_batches)
                if is_fully_sharded(last) and states:  # whose output layer is freed behind the block
                    weight = states[0].weight.clone()
                    states = [replace(each, weight=weight) for each in states]
                return scores, states
        finally:
            last.states = None

    def mean_logprob(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The mean log-prob of all targets of all ranks, the same on every rank; as `score` otherwise."""
        scores = self.score(micro_batches)
        sums: dict[str, Tensor] = {}
        if parallel_state.is_pipeline_last_stage():
            total = torch.stack([each.double().sum() for each in scores]).sum()
            sums = {"logprob": total, "targets": torch.full_like(total, sum(len(each) for each in scores))}
        sums = self._reduced(sums)
        return float(sums["logprob"] / sums["targets"].clamp(min=1))

    def logprobs(self, micro_batches: Sequence[MicroBatch], targets: int) -> Tensor:
        """The log-probs float32 [targets] of all targets of all ranks, each in its place, the same on every rank.

        `targets`: of all ranks. As `score` otherwise.
        """
        scores = self.score(micro_batches)
        sums: dict[str, Tensor] = {}
        if parallel_state.is_pipeline_last_stage():
            found = torch.zeros(targets, device=self._ranks.device.torch_device)
            for micro, each in zip(micro_batches, scores, strict=True):
                found[torch.from_numpy(micro.place).to(found.device)] = each.float()
            sums = {"logprobs": found}  # the other data-parallel ranks have zeros in these places
        return self._reduced(sums)["logprobs"]

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        for chunk in self._chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in self._chunks:
                chunk.train()
                if isinstance(chunk, FullySharded):
                    chunk.free()

    def _scores(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        logprobs = self._run(micro_batches, _logprobs, forward_only=True)
        return logprobs or [torch.zeros(0, device=self._ranks.device.torch_device) for _ in micro_batches]

    def _run(self, micro_batches: Sequence[MicroBatch], finish: Callable[..., Any], forward_only: bool) -> list[Any]:
        """What `finish` gave for each micro batch, in order; [] unless this rank is of the last stage."""
        if not micro_batches:
            raise ValueError("a pass needs one micro batch at least; a row without a target will do")
        iterators = [iter(enumerate(micro_batches)) for _ in self._chunks]
        longest = self._rows.length(micro_batches)
        return get_forward_backward_func()(
            forward_step_func=partial(self._forward, finish=finish, longest=longest, scoring=forward_only),
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks,
            num_microbatches=len(micro_batches),
            seq_length=longest,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _forward(
        self,
        micro_batches: Iterator[tuple[int, MicroBatch]],
        model: torch.nn.Module,
        finish: Callable[..., Any],
        longest: int,
        scoring: bool,
    ) -> tuple[Any, Callable[..., Any]]:
        """Megatron's forward step: the model's output, and the function that Megatron calls with it."""
        index, micro = next(micro_batches)
        try:
            row = self._rows.make(micro, longest)
            with contextlib.nullcontext() if scoring else self._stopwatch.running():
                targets = row.targets
                if self._references and not scoring:
                    targets = replace(targets, reference=self._references[index])
                output = model(row.ids, row.positions, None, labels=targets, packed_seq_params=row.packed)
        except DATA_ERRORS as error:
            raise MicroBatchFailed(micro.groups, error) from error
        if scoring and isinstance(output, tuple):
            # Where no loss is made of it, Megatron takes the output for one tensor.
            output = output[0]
        return output, partial(finish, index=index)

    def _part(self, loss: Loss, output: tuple[Tensor, ...], index: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Megatron's triple (loss, number of tokens, sums): with a count it neither averages nor scales the loss."""
        with self._stopwatch.running():
            value, sums = loss(*output[:2], index, *output[2:])
        return value, torch.zeros((), dtype=torch.int, device=value.device), sums

    def _finalize(self, model: list[torch.nn.Module], num_tokens: Tensor | None = None, **groups: Any) -> None:
        """Sum the gradients over ranks, without dividing by a token count: the loss is divided already."""
        self._ranks.device.synchronize()
        self.busy, self.forward = time.perf_counter() - self._began, self._stopwatch.pop()
        finalize_model_grads(model, None, **groups)

    def _reduced(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sums of the last stage over data-parallel ranks, and then on every stage."""
        if sums:
            sums = _over_data_parallel(sums)
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return sums
        on_host = from_last_stage({key: value.cpu() for key, value in sums.items()})
        return {key: value.to(self._ranks.device.torch_device) for key, value in on_host.items()}


def _logprobs(output: Tensor, index: int, non_loss_data: bool) -> Tensor:
    return output


def _over_data_parallel(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over the data-parallel ranks: `max/...` by their largest, the others added."""
    group = parallel_state.get_data_parallel_group()
    reduced = dict(sums)
    for keys, operation in (
        ([key for key in sums if not key.startswith(MAX)], dist.ReduceOp.SUM),
        ([key for key in sums if key.startswith(MAX)], dist.ReduceOp.MAX),
    ):
        if not keys:
            continue
        stacked = torch.stack([sums[key] for key in keys])
        dist.all_reduce(stacked, operation, group=group)
        reduced |= dict(zip(keys, stacked, strict=True))
    return reduced

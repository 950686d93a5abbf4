"""The ranks of `benchmarks.parity`: each computes its part of one gradient after another, in one layout after another.

Starting a process takes longer than a case, so each takes many.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from benchmarks import ready_ranks
from benchmarks.random_models import IMAGE, make_batch, with_images, worst
from streamrl.algo.aggregations.base import Denominators
from streamrl.algo.losses import policy_loss
from streamrl.config import Config
from streamrl.learner.forward import Passes, Wrapped, wrap
from streamrl.learner.fully_sharded import FullySharded
from streamrl.learner.gradient_noise import NOISE, SIGNAL, GradientNoise
from streamrl.learner.huggingface import export_weights, load_weights
from streamrl.learner.model import PolicyModel, build
from streamrl.learner.optimizer import PolicyOptimizer
from streamrl.learner.packing import MicroBatch, Packing, plan_batch
from streamrl.learner.parallel import Ranks
from streamrl.learner.params_metrics import ParamsMetrics, pads
from streamrl.learner.shape import read_shape
from streamrl.learner.step import shares_of, tokens_of
from streamrl.types import Batch

DEADLINE = 90.0  # seconds that ranks may take for one case, their start included


@dataclass(frozen=True, slots=True)
class Case:
    """One gradient: a configuration, and whether rows are packed or hold one sequence each."""

    name: str
    config: str  # JSON
    packed: bool = True


@dataclass(frozen=True, slots=True)
class Gradient:
    """What a case gave: the whole gradient under Hugging Face names, float32."""

    loss: float
    norm: float  # as the optimizer clips by it
    params_norm: float
    zeros: float  # share of the gradient's entries
    signal: float  # of the final norm's gradient, from its micro batches; 0 where there is one alone
    noise: float
    scores: float  # largest difference of the log-probs that `score` gives to those that the loss saw, nats
    tensors: dict[str, Tensor]

    @property
    def of_norm(self) -> float:
        """Squared norm of the final norm's gradient, whatever its micro batches are."""
        return self.signal + self.noise


def run_ranks(cases: Sequence[Case], world: int) -> dict[str, Gradient]:
    """Start `world` processes, which compute all cases.

    Raises RuntimeError with what the first rank that failed said, TimeoutError after DEADLINE seconds a case.
    """
    # One meeting for each case: a process group that has ended leaves its names behind in its store.
    meetings = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in cases]
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out.pt"
        given = [(case, store.port) for case, store in zip(cases, meetings, strict=True)]
        ready_ranks.run(world, _compute, (given, out), DEADLINE * len(cases))
        return {case: Gradient(**gradient) for case, gradient in torch.load(out).items()}


def _compute(cases: Sequence[tuple[Case, int]], out: Path) -> None:
    """What a rank does: every case, at a port of its own; the first one writes what they gave."""
    results = {}
    for case, port in cases:
        os.environ["MASTER_PORT"] = str(port)
        results[case.name] = asdict(gradient_of(case))
    if int(os.environ["RANK"]) == 0:
        torch.save(results, out)


def gradient_of(case: Case) -> Gradient:
    """The gradient of the loss on one batch: on every rank the loss, on rank 0 the tensors too."""
    config = Config.model_validate_json(case.config)
    ranks = Ranks.start(config)
    try:
        chunks = build(read_shape(config.model.path, family=config.model.built_by), config, ranks.device)
        wrapped = wrap(chunks, config, ranks)
        load_weights(chunks, config.model.path)
        passes = Passes(wrapped, ranks, config)
        batch = with_images(make_batch(groups=4, longest=40), config.model.path)
        mine = _micro_batches(batch, config, case.packed)[parallel_state.get_data_parallel_rank()]
        step = Step(mine, Denominators.of(sample.loss_mask for sample in batch.samples), config)
        noise = GradientNoise(wrapped[-1], ranks.device.torch_device)
        with noise.observing(shares_of(mine, config.algo)):
            sums = passes.forward_backward(mine, step.loss)
        scores = step.difference(passes.score(mine), ranks)
        optimizer = PolicyOptimizer(wrapped, config.learner.optimizer, getattr(torch, config.model.dtype), 1, 0)
        optimizer.megatron.prepare_grads()
        norm = float(optimizer.megatron.get_grad_norm())
        padding = pads(chunks[0].shape, config.learner.layout.tensor)
        seen = ParamsMetrics(optimizer.megatron, padding, ranks.device.torch_device)
        seen.observe_gradients()
        params_norm, zeros = seen.metrics().values()
        of_parts = noise.metrics()
        return Gradient(
            loss=float(sums["loss"].sum()),
            norm=norm,
            params_norm=params_norm,
            zeros=zeros,
            signal=of_parts.get(SIGNAL, 0.0),
            noise=of_parts.get(NOISE, 0.0),
            scores=scores,
            tensors=_whole_gradient(chunks, wrapped),
        )
    finally:
        ranks.stop()


def _micro_batches(batch: Batch, config: Config, packed: bool) -> list[list[MicroBatch]]:
    """[ranks][K]: packed as the learner does, or one sequence a row with its own prompt."""
    layout, ranks = config.learner.layout, parallel_state.get_data_parallel_world_size()
    advantages = [sample.reward - 0.5 for sample in batch.samples]
    packing = Packing(
        ranks=ranks,
        budget=config.learner.tokens_per_micro_batch,
        share_prompts=packed,
        multiple=layout.rows_multiple,
        image_token=IMAGE if read_shape(config.model.path, family=config.model.built_by).vision else None,
    )
    if packed:
        return plan_batch(batch, advantages, packing)
    alone = [
        msgspec.structs.replace(batch, groups=(msgspec.structs.replace(group, samples=(sample,)),))
        for group in batch.groups
        for sample in group.samples
    ]
    rows = [plan_batch(one, [advantages[index]], packing)[0][0] for index, one in enumerate(alone)]
    return [rows[rank::ranks] for rank in range(ranks)]


class Step:
    """The loss of a step's micro batches, and the log-probs that it was given."""

    def __init__(self, micro_batches: Sequence[MicroBatch], denominators: Denominators, config: Config) -> None:
        self._micro_batches = micro_batches
        self._denominators = denominators
        self._algo = config.algo
        self._seen: dict[int, Tensor] = {}

    def loss(self, logprobs: Tensor, entropy: Tensor, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The part of micro batch `index`, for `Passes.forward_backward`."""
        micro = self._micro_batches[index]
        self._seen[index] = logprobs.detach().clone()
        tokens = tokens_of(micro, logprobs, entropy)
        return policy_loss(tokens, self._algo, self._denominators)

    def difference(self, scores: Sequence[Tensor], ranks: Ranks) -> float:
        """The largest difference of scores to the log-probs that the loss saw, over all ranks; inf where one is NaN."""
        both = [(scores[index], seen) for index, seen in self._seen.items() if len(seen)]
        largest = torch.tensor(worst([0.0, *(float((ours - seen).abs().max()) for ours, seen in both)]))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks.control)
        return float(largest)


def _whole_gradient(chunks: Sequence[PolicyModel], wrapped: Sequence[Wrapped]) -> dict[str, Tensor]:
    """float32, under Hugging Face names, on rank 0: it goes the way of the weights."""
    _gather(wrapped)
    for chunk in wrapped:
        for parameter in chunk.parameters():
            gradient = parameter.main_grad.float()
            if isinstance(chunk, FullySharded):
                parameter.data.copy_(gradient)  # a shard, whose place is what is gathered
            else:
                parameter.data = gradient
    return {name: tensor.detach().cpu().clone() for name, tensor in export_weights(chunks)}


def _gather(wrapped: Sequence[Wrapped]) -> None:
    """The distributed optimizer leaves each rank its part of the summed gradient: put the parts together."""
    for chunk in wrapped:
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            for bucket in buffer.buckets:
                parts = list(bucket.grad_data.chunk(buffer.data_parallel_world_size))
                mine = parts[dist.get_rank(buffer.data_parallel_group)].clone()
                dist.all_gather(parts, mine, group=buffer.data_parallel_group)

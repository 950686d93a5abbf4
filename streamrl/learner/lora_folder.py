"""Adapters between a Megatron model and a PEFT folder, exactly in both directions, in every layout.

Every projection has an A and a B of its own on both sides, so that nothing is approximated: what differs is
how Megatron lays a fused layer's rows, and which matrix is cut over tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.learner import LORA_PROJECTIONS, LoraConfig
from streamrl.learner.lora import PARAMETERS, Adapted, adapters, draw
from streamrl.learner.model import PolicyModel
from streamrl.learner.shape import ModelShape
from streamrl.publish.peft import Matrix, read_adapter, read_configuration, tensor_name, write_adapter


def start(chunks: Sequence[PolicyModel], config: Config) -> None:
    """Set the adapters of a run's step 0: those of `learner.lora.adapter`, or fresh ones that change nothing.

    Raises ConfigError for a folder whose adapters are not those of the configuration.
    """
    settings = config.learner.lora
    draw(chunks, config.run.seed)
    if settings.adapter is not None:
        load_adapters(chunks, settings.adapter, settings)


def load_adapters(chunks: Sequence[PolicyModel], folder: Path, settings: LoraConfig) -> None:
    """Set the adapters of this rank from a PEFT folder. A projection that it does not have stays as it is.

    Raises ConfigError when rank or alpha differ, a tensor has another shape or no place in the model.
    """
    _check_settings(folder, settings)
    tensors = read_adapter(folder)[1]
    _refuse_others(folder, tensors, settings, chunks[0].shape)
    prefix = chunks[0].shape.family.adapters_prefix
    for layer, module in adapters(chunks):
        pairs = []
        for projection, (a, b) in zip(LORA_PROJECTIONS[module.target], module.pairs, strict=True):
            names = tensor_name(layer, projection, "A", prefix), tensor_name(layer, projection, "B", prefix)
            pairs.append(_shards(module, names, tensors) if names[0] in tensors else (a, b))
        module.set_pairs(pairs)


def _check_settings(folder: Path, settings: LoraConfig) -> None:
    given = read_configuration(folder)
    for key, name, value in (("rank", "r", settings.rank), ("alpha", "lora_alpha", settings.alpha)):
        if given[name] != value:
            raise ConfigError(f"learner.lora.{key}: {value:g}, but {folder} has {name}={given[name]:g}; allowed: that")


def _refuse_others(folder: Path, tensors: dict[str, Tensor], settings: LoraConfig, shape: ModelShape) -> None:
    """Nothing of the folder is left out silently, in whatever layer and on whichever rank it belongs."""
    prefix = shape.family.adapters_prefix
    places = {
        tensor_name(layer, projection, matrix, prefix): (target, size)
        for target, projections in LORA_PROJECTIONS.items()
        for projection in projections
        for matrix, size in _sizes(projection, settings.rank, shape).items()
        for layer in range(shape.layers)
    }
    for name in sorted(tensors):
        if name not in places:
            raise ConfigError(
                f"learner.lora.adapter: {name} of {folder} has no place in the model; "
                f"allowed: {tensor_name(0, 'self_attn.q_proj', 'A', prefix)} and its like, layers 0..{shape.layers - 1}"
            )
        target, size = places[name]
        if target not in settings.targets:
            raise ConfigError(
                f"learner.lora.targets: {', '.join(settings.targets)} has no place for {name} of {folder}; "
                f"needed too: {target}"
            )
        if (given := tuple(tensors[name].shape)) != size:
            raise ConfigError(
                f"learner.lora.adapter: {name} of {folder} is {list(given)}, the model needs {list(size)}"
            )


def _sizes(projection: str, rank: int, shape: ModelShape) -> dict[Matrix, tuple[int, int]]:
    """The shapes of A and B of one projection of the whole model."""
    queries, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    inputs, outputs = {
        "self_attn.q_proj": (shape.hidden, queries),
        "self_attn.k_proj": (shape.hidden, keys),
        "self_attn.v_proj": (shape.hidden, keys),
        "self_attn.o_proj": (shape.heads * shape.value_dim, shape.hidden),
        "mlp.gate_proj": (shape.hidden, shape.ffn),
        "mlp.up_proj": (shape.hidden, shape.ffn),
        "mlp.down_proj": (shape.ffn, shape.hidden),
    }[projection]
    return {"A": (rank, inputs), "B": (outputs, rank)}


def _shards(module: Adapted, names: tuple[str, str], tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A and B of one projection as this rank holds them."""
    a, b = tensors[names[0]], tensors[names[1]]
    ranks, rank = module.tp_group.size(), module.tp_group.rank()
    if module.cut == "lora_a":
        a = a.chunk(ranks, 1)[rank]
    else:
        b = b.chunk(ranks, 0)[rank]
    return a, b


@torch.no_grad()
def export_adapters(chunks: Sequence[PolicyModel]) -> Iterator[tuple[str, Tensor]]:
    """Every adapter of the whole model under PEFT's names, layer by layer, on the model's device.

    Collective: all ranks iterate. Rank 0 and the ranks that share its replica of the model get every tensor, the
    others none. A tensor may share memory with the parameter: it is valid until the weights change.
    """
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    stages = parallel_state.get_pipeline_model_parallel_group()
    held = {layer: [module for _, module in some] for layer, some in groupby(adapters(chunks), lambda pair: pair[0])}
    template = next(iter(held.values()))  # every layer has the same targets, and every stage a layer
    prefix = chunks[0].shape.family.adapters_prefix
    for layer, owner in enumerate(_owners(list(held), template[0].weight.device, stages)):
        matrices = [matrix for module in held.get(layer, template) for matrix in _matrices(module, layer in held)]
        if stages.size() > 1:
            matrices = _from_stage(matrices, owner, stages)
        names = (
            tensor_name(layer, projection, matrix, prefix)
            for module in template
            for projection in LORA_PROJECTIONS[module.target]
            for matrix in ("A", "B")
        )
        yield from zip(names, matrices, strict=True)


def save_adapters(chunks: Sequence[PolicyModel], folder: Path, settings: LoraConfig, base: Path) -> None:
    """Write the adapters of the whole model as a PEFT folder, from rank 0. Collective. `base`: their model."""
    tensors = [(name, tensor.cpu()) for name, tensor in export_adapters(chunks)]
    if dist.get_rank() == 0:
        write_adapter(folder, tensors, settings, base, durable=True)


def _matrices(module: Adapted, gather: bool) -> Iterator[Tensor]:
    """A, B, A, B, ... of a layer's projections, whole; without `gather` just tensors of these shapes."""
    ranks = module.tp_group.size()
    for pair in module.pairs:
        for name, dim, tensor in zip(PARAMETERS, (1, 0), pair, strict=True):
            if name != module.cut or ranks == 1:
                yield tensor if gather else torch.empty_like(tensor)
                continue
            parts = [torch.empty_like(tensor) for _ in range(ranks)]
            if gather:
                dist.all_gather(parts, tensor.contiguous(), group=module.tp_group)
            yield torch.cat(parts, dim)


def _owners(held: Sequence[int], device: torch.device, stages: dist.ProcessGroup) -> list[int]:
    """For each layer of the model, the pipeline stage that has it. `held`: the layers of this stage."""
    count = torch.tensor(max(held) + 1, device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX, group=stages)
    owners = torch.zeros(int(count), dtype=torch.int64, device=device)
    owners[list(held)] = stages.rank()
    dist.all_reduce(owners, dist.ReduceOp.MAX, group=stages)
    return [int(owner) for owner in owners]


def _from_stage(tensors: Sequence[Tensor], owner: int, stages: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of stage `owner`, on all stages, by one broadcast."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.broadcast(flat, dist.get_global_rank(stages, owner), group=stages)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

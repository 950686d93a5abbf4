"""Low-rank adapters on Megatron's parallel linear layers: y = x W^T + scale * dropout(x) A^T B^T, W frozen.

Every projection that Hugging Face knows (q, k, v, gate, up, ...) has an A and a B of its own, also where
Megatron fuses several into one layer, so that a PEFT folder goes in and comes out exactly:

    linear_qkv   lora_a [3 r, in]   q's A above k's above v's       lora_b [out, r]   rows as in `weight`
    linear_fc1   lora_a [2 r, in]   gate's A above up's             lora_b [out, r]   rows as in `weight`
    others       lora_a [r, in]                                     lora_b [out, r]

A layer that cuts its outputs over tensor-parallel ranks cuts B with them and keeps A whole; one that cuts its
inputs cuts A and keeps B whole. What crosses ranks is x A^T, r numbers a token and projection.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from streamrl.config.file import ConfigError
from streamrl.config.learner import LoraConfig, LoraTarget

# Names of an adapter's parameters in its layer, beside `weight`.
PARAMETERS = ("lora_a", "lora_b")


def is_adapter_parameter(name: str) -> bool:
    """Example: `decoder.layers.0.mlp.linear_fc1.lora_a` is one."""
    return name.rpartition(".")[2] in PARAMETERS


class Adapted(ABC):
    """A parallel linear layer with an adapter: what both kinds share. Parameters are this rank's shards."""

    target: LoraTarget
    sizes: tuple[int, ...]  # output rows of each projection, in one block; blocks repeat over this rank's rows
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    weight: nn.Parameter
    config: Any  # Megatron's, of the model
    input_size: int  # of the whole layer
    sequence_parallel: bool
    scale: float
    rank: int
    active: bool
    training: bool
    tp_group: Any  # tensor-parallel
    _dropout: float

    @property
    @abstractmethod
    def cut(self) -> Literal["lora_a", "lora_b"]:
        """Which of PARAMETERS is cut over tensor-parallel ranks; the other one is the same on all."""

    @abstractmethod
    def draw(self, generator: torch.Generator) -> None:
        """Set a fresh adapter: B zero, A uniform within 1 / sqrt(inputs), as PEFT draws it (He et al. 2015, a^2 = 5).

        The draw is of the whole A, so that it does not depend on the layout.
        """

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """(A [r, in], B [out, r]) of each projection, in order; of this rank, without gradients."""
        parts = self.lora_a.detach().chunk(len(self.sizes))
        return list(zip(parts, self._by_projection(self.lora_b.detach()), strict=True))

    @torch.no_grad()
    def set_pairs(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Put the matrices of `pairs` in place of those of this rank."""
        self.lora_a.copy_(torch.cat([a for a, _ in pairs]))
        self.lora_b.copy_(self._joined([b for _, b in pairs], 0))

    def effective_weight(self) -> Tensor:
        """W + scale * B A of this rank's shard, in W's dtype; the sum is made in float32 and rounded once."""
        delta = self._joined([b.float() @ a.float() for a, b in self.pairs], 0)
        return (self.weight.detach().float() + self.scale * delta).to(self.weight.dtype)

    def _add_adapter(
        self, target: LoraTarget, settings: LoraConfig, sizes: tuple[int, ...], shape: Sequence[int]
    ) -> None:
        """`shape`: [rows, columns] of this rank's weight."""
        rows, columns = shape
        like: dict[str, Any] = {"dtype": self.weight.dtype, "device": self.weight.device}
        self.target, self.sizes, self.rank = target, sizes, settings.rank
        self.scale, self._dropout, self.active = settings.alpha / settings.rank, settings.dropout, True
        self.lora_a = nn.Parameter(torch.zeros(len(sizes) * self.rank, columns, **like))
        self.lora_b = nn.Parameter(torch.zeros(rows, self.rank, **like))

    def _by_projection(self, tensor: Tensor) -> list[Tensor]:
        """Rows [out, ...] in the layer's order -> the rows of each projection, in order."""
        blocks = tensor.unflatten(0, (-1, sum(self.sizes))).split(self.sizes, 1)
        return [block.flatten(0, 1) for block in blocks]

    def _joined(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The reverse of `_by_projection`, along `dim`."""
        blocks = [part.unflatten(dim, (-1, size)) for part, size in zip(parts, self.sizes, strict=True)]
        return torch.cat(blocks, dim + 1).flatten(dim, dim + 1)

    def _high(self, low: Tensor) -> Tensor:
        """scale * low B^T, [s, b, out], of low = x A^T, [s, b, projections * rank]."""
        pairs = zip(low.chunk(len(self.sizes), -1), self._by_projection(self.lora_b), strict=True)
        return self.scale * self._joined([F.linear(part, b) for part, b in pairs], low.dim() - 1)

    def _dropped(self, x: Tensor, same_on_ranks: bool) -> Tensor:
        """Dropout on the input; where each tensor-parallel rank has another part of it, each draws for itself."""
        if not self.training or self._dropout == 0:
            return x
        source = contextlib.nullcontext() if same_on_ranks else get_cuda_rng_tracker().fork()
        with source:
            return F.dropout(x, self._dropout)


class ColumnAdapter(Adapted):
    """The adapter of a layer whose outputs are cut over ranks: A whole, B cut by rows."""

    @property
    def cut(self) -> Literal["lora_a", "lora_b"]:
        return "lora_b"

    def add_adapter(self, target: LoraTarget, settings: LoraConfig) -> None:
        """Make the parameters, when the layer has its own."""
        self._add_adapter(target, settings, self._sizes(target), self.weight.shape)
        set_tensor_model_parallel_attributes(self.lora_b, True, 0, 1)
        # With sequence parallelism each rank sees some of the tokens: Megatron sums such gradients over ranks.
        self.lora_a.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def adapt(self, input_: Tensor, output: Tensor) -> Tensor:
        """[s, b, in] and the layer's own [s, b, out of this rank] -> their output with the adapter's."""
        if not self.active:
            return output
        low = F.linear(self._dropped(input_, same_on_ranks=not self.sequence_parallel), self.lora_a)
        spread = (
            gather_from_sequence_parallel_region if self.sequence_parallel else copy_to_tensor_model_parallel_region
        )
        return output + self._high(spread(low, group=self.tp_group))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        self.lora_a.copy_(_uniform(self.lora_a.size(0), self.input_size, generator))
        self.lora_b.zero_()

    def shards(self, state: dict[str, Any], prefix: str, offsets: Any, metadata: Any) -> dict[str, Any]:
        """What a checkpoint is told of the layer's `state`: B is cut like the layer's rows."""
        sharded = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"weight": 0, "bias": 0, "lora_b": 0},
            offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if self.target == "linear_fc1":  # gate above up on each rank; the MLP knows that of weight and bias alone
            single = metadata.get("singleton_local_shards", False)
            key = f"{prefix}lora_b"
            sharded[key] = apply_swiglu_sharded_factory(sharded[key], offsets, single)
        return cast(dict[str, Any], sharded)

    def _sizes(self, target: LoraTarget) -> tuple[int, ...]:
        config, rows = self.config, self.weight.size(0)
        if target == "linear_qkv":  # one block for each query group: its queries, its key, its value
            queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
            return (queries, config.kv_channels, config.kv_channels)
        return (rows // 2, rows // 2) if config.gated_linear_unit else (rows,)


class RowAdapter(Adapted):
    """The adapter of a layer whose inputs are cut over ranks: A cut by columns, B whole."""

    @property
    def cut(self) -> Literal["lora_a", "lora_b"]:
        return "lora_a"

    def add_adapter(self, target: LoraTarget, settings: LoraConfig) -> None:
        """Make the parameters, when the layer has its own."""
        self._add_adapter(target, settings, (self.weight.size(0),), self.weight.shape)
        set_tensor_model_parallel_attributes(self.lora_a, True, 1, 1)
        self.lora_b.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def adapt(self, input_: Tensor, output: Tensor) -> Tensor:
        """[s, b, in of this rank] and the layer's own [s, b, out] -> their output with the adapter's."""
        if not self.active:
            return output
        low = F.linear(self._dropped(input_, same_on_ranks=False), self.lora_a)
        whole = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        return output + self._high(whole(low, group=self.tp_group))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        whole = _uniform(self.lora_a.size(0), self.input_size, generator)
        self.lora_a.copy_(whole.chunk(self.tp_group.size(), 1)[self.tp_group.rank()])
        self.lora_b.zero_()

    def shards(self, state: dict[str, Any], prefix: str, offsets: Any, metadata: Any) -> dict[str, Any]:
        """What a checkpoint is told of the layer's `state`: A is cut like the layer's columns."""
        sharded = make_sharded_tensors_for_checkpoint(
            state,
            prefix,
            {"weight": 1, "lora_a": 1},
            offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return cast(dict[str, Any], sharded)


class AdaptedColumn(ColumnParallelLinear, ColumnAdapter):
    """Megatron's local layer that cuts its outputs."""

    def __init__(self, *args: Any, target: LoraTarget, settings: LoraConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_adapter(target, settings)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """[s, b, in] -> ([s, b, out of this rank], bias where it is left to the caller)."""
        output, bias = super().forward(input_, *args, **kwargs)
        return self.adapt(input_, output), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return self.shards(self.state_dict(prefix="", keep_vars=True), prefix, sharded_offsets, metadata)


class AdaptedRow(RowParallelLinear, RowAdapter):
    """Megatron's local layer that cuts its inputs."""

    def __init__(self, *args: Any, target: LoraTarget, settings: LoraConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_adapter(target, settings)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[s, b, in of this rank] -> ([s, b, out], bias where it is left to the caller)."""
        output, bias = super().forward(input_)
        return self.adapt(input_, output), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return self.shards(self.state_dict(prefix="", keep_vars=True), prefix, sharded_offsets, metadata)


@dataclass(frozen=True, slots=True)
class _Kinds:
    """The layers that can have an adapter, with what takes their place."""

    adapted: Mapping[type, type[Adapted]]
    normalising: type | None = None  # the one that has its norm inside: `norm` then comes before its place
    norm: Any = None


_LOCAL = _Kinds({ColumnParallelLinear: AdaptedColumn, RowParallelLinear: AdaptedRow})

# The layers that may have an adapter, by the part of a transformer layer that they are in.
_PLACES: dict[str, tuple[LoraTarget, ...]] = {
    "self_attention": ("linear_qkv", "linear_proj"),
    "mlp": ("linear_fc1", "linear_fc2"),
}

# Where the norm of a normalising layer is when it is apart, and what a checkpoint calls its weight in either case.
_NORMS: dict[LoraTarget, tuple[str, str]] = {
    "linear_qkv": ("input_layernorm", "self_attention.linear_qkv.layer_norm_weight"),
    "linear_fc1": ("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm_weight"),
}


def _engine() -> _Kinds:
    """Transformer Engine's, whose module is imported only where the model is made of its layers."""
    from streamrl.learner import lora_engine

    return _Kinds(lora_engine.KINDS, lora_engine.NORMALISING, lora_engine.NORM)


def adapted(layer: ModuleSpec, settings: LoraConfig, *, engine: bool = False) -> ModuleSpec:
    """The specification of a transformer layer with adapters on `settings.targets`.

    engine: the layer is of Transformer Engine's modules, else of Megatron's local ones. Experts get no adapters.
    Raises ConfigError where a target is not a layer of this model, TypeError for layers of another kind.
    """
    if settings.rank == 0:
        return layer
    kinds, parts = _engine() if engine else _LOCAL, layer.submodules
    changes: dict[str, Any] = {}
    keys = dict(parts.sharded_state_dict_keys_map)
    for place, names in _PLACES.items():
        spec, linears = getattr(parts, place), {}
        for name in (name for name in names if name in settings.targets):
            base = _base(spec, name, kinds)
            linears[name] = ModuleSpec(kinds.adapted[base], params={"target": name, "settings": settings})
            if base is kinds.normalising:
                norm, key = _NORMS[name]
                changes[norm], keys[f"{norm}.weight"] = kinds.norm, key
        changes[place] = replace(spec, submodules=replace(spec.submodules, **linears))
    return replace(layer, submodules=replace(parts, **changes, sharded_state_dict_keys_map=keys))


def _base(spec: ModuleSpec, name: LoraTarget, kinds: _Kinds) -> type:
    """The layer of this name that an adapter is wanted on."""
    base: type | None = getattr(spec.submodules, name, None)
    if base is None:
        raise ConfigError(
            f"learner.lora.targets: {name} is a layer of experts in this model, which get no adapters; "
            "allowed: linear_qkv, linear_proj"
        )
    if base not in kinds.adapted:
        raise TypeError(f"{name} is {base}; adapters are for {', '.join(kind.__name__ for kind in kinds.adapted)}")
    return base


def freeze(chunks: Sequence[nn.Module]) -> None:
    """Train the adapters alone. Call it on the PolicyModels, before data parallelism wraps them."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(is_adapter_parameter(name))
        config: Any = chunk.config
        embedding = getattr(chunk, "embedding", None)  # of the first pipeline stage
        if config.recompute_granularity == "full" and embedding is not None:
            embedding.register_forward_hook(_ask_for_gradient)


def _ask_for_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """A recomputed layer has gradients only if its input asks for one, which a frozen embedding's output does not."""
    if torch.is_grad_enabled():
        output.requires_grad_()


def adapters(chunks: Sequence[nn.Module]) -> Iterator[tuple[int, Adapted]]:
    """Every adapted layer of this rank with the index of its transformer layer in the whole model, in order."""
    decoders: Iterator[Any] = (chunk.decoder for chunk in chunks)
    for layer in itertools.chain.from_iterable(decoder.layers for decoder in decoders):
        for module in layer.modules():
            if isinstance(module, Adapted):
                yield layer.layer_number - 1, module


def draw(chunks: Sequence[nn.Module], seed: int) -> None:
    """Set fresh adapters, the same in every layout: the product B A is zero, the policy that of the base weights."""
    for layer, module in adapters(chunks):
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {layer} {module.target}".encode()))
        module.draw(generator)


@contextlib.contextmanager
def disabled(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Compute with the base weights alone, bitwise."""
    modules = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapted)]
    former = [module.active for module in modules]
    for module in modules:
        module.active = False
    try:
        yield
    finally:
        for module, active in zip(modules, former, strict=True):
            module.active = active


def _uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """float32 [rows, columns] within 1 / sqrt(columns)."""
    return torch.empty(rows, columns).uniform_(-1, 1, generator=generator) / math.sqrt(columns)

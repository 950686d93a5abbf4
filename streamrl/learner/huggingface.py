"""Weights between a Hugging Face folder and a Megatron model, tensor by tensor, bitwise in both directions.

    safetensors ──read──▶ merge (q, k, v -> qkv) ──▶ shard of this rank ──▶ parameter
    parameter ──gather the shards──▶ split (qkv -> q, k, v) ──▶ (Hugging Face name, tensor)

Never is more than one parameter's worth of tensors held beside the model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from streamrl.learner.model import PolicyModel
from streamrl.learner.shape import ModelShape

SHARD_BYTES = 4 << 30
"""Bytes of one safetensors file that is written."""

_INDEX = "model.safetensors.index.json"
_NOT_COPIED = re.compile(r".*\.(safetensors|bin|pt|pth|gguf)|.*\.index\.json")


class WeightsMismatchError(ValueError):
    """The folder's tensors are not those of the model; the text names the first of them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one Megatron parameter is made of Hugging Face tensors, and how it is cut over tensor-parallel ranks.

    merge: whole Hugging Face tensors -> whole parameter; split: the reverse.
    shard: whole parameter, ranks, rank -> this rank's part; unshard: all parts, in order -> whole parameter.
    """

    merge: Callable[[ModelShape, int, Sequence[Tensor]], Tensor]
    split: Callable[[ModelShape, Tensor], list[Tensor]]
    shard: Callable[[Tensor, int, int], Tensor]
    unshard: Callable[[Sequence[Tensor]], Tensor]


def _merge_qkv(shape: ModelShape, _: int, tensors: Sequence[Tensor]) -> Tensor:
    """Megatron keeps the heads of a query group together: [q, ..., q, k, v] for each group."""
    parts = [tensor.unflatten(0, (shape.groups, -1)) for tensor in tensors]
    return torch.cat(parts, 1).flatten(0, 1)


def _split_qkv(shape: ModelShape, whole: Tensor) -> list[Tensor]:
    query = shape.heads // shape.groups * shape.head_dim
    grouped = whole.unflatten(0, (shape.groups, -1))
    return [part.flatten(0, 1) for part in grouped.split([query, shape.head_dim, shape.head_dim], 1)]


def _merge_vocabulary(shape: ModelShape, padded: int, tensors: Sequence[Tensor]) -> Tensor:
    (tensor,) = tensors
    if len(tensor) != shape.vocabulary:
        raise WeightsMismatchError(f"an embedding has {len(tensor)} rows, config.json says {shape.vocabulary}")
    return torch.cat([tensor, tensor.new_zeros(padded - len(tensor), tensor.size(1))])


def _rows(whole: Tensor, ranks: int, rank: int) -> Tensor:
    return whole.chunk(ranks)[rank]


def _columns(whole: Tensor, ranks: int, rank: int) -> Tensor:
    return whole.chunk(ranks, 1)[rank]


def _joined_rows(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts))


def _gate_and_up(whole: Tensor, ranks: int, rank: int) -> Tensor:
    """Each rank holds its rows of the gate above its rows of the up projection."""
    return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])


def _unshard_gate_and_up(parts: Sequence[Tensor]) -> Tensor:
    halves = [part.chunk(2) for part in parts]
    return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])


def _same(shape: ModelShape, _: int, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0]


REPLICATED = Layout(_same, lambda s, t: [t], lambda t, ranks, rank: t, lambda parts: parts[0])
ROWS = Layout(_same, lambda s, t: [t], _rows, _joined_rows)
COLUMNS = Layout(_same, lambda s, t: [t], _columns, lambda parts: torch.cat(list(parts), 1))
QKV = Layout(_merge_qkv, _split_qkv, _rows, _joined_rows)
GATE_AND_UP = Layout(
    lambda s, _, ts: torch.cat(list(ts)), lambda s, t: list(t.chunk(2)), _gate_and_up, _unshard_gate_and_up
)
VOCABULARY = Layout(_merge_vocabulary, lambda s, t: [t[: s.vocabulary]], _rows, _joined_rows)

_OUTSIDE_LAYERS = {
    "embedding.word_embeddings.weight": (VOCABULARY, ("model.embed_tokens.weight",)),
    "output_layer.weight": (VOCABULARY, ("lm_head.weight",)),
    "decoder.final_layernorm.weight": (REPLICATED, ("model.norm.weight",)),
}
_IN_A_LAYER = {
    "input_layernorm.weight": (REPLICATED, ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": (QKV, tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": (QKV, tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.q_layernorm.weight": (REPLICATED, ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": (REPLICATED, ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": (COLUMNS, ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": (REPLICATED, ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": (GATE_AND_UP, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": (COLUMNS, ("mlp.down_proj.weight",)),
    # Transformer Engine keeps a norm inside the linear layer that follows it.
    "self_attention.linear_qkv.layer_norm_weight": (REPLICATED, ("input_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": (REPLICATED, ("post_attention_layernorm.weight",)),
}


def layout_of(name: str, first_layer: int) -> tuple[Layout, tuple[str, ...]]:
    """The layout and the Hugging Face names of a parameter of this pipeline stage, whose layers begin at `first_layer`.

    >>> layout_of("decoder.layers.0.mlp.linear_fc2.weight", first_layer=12)[1]
    ('model.layers.12.mlp.down_proj.weight',)
    """
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None or match[2] not in _IN_A_LAYER:
        raise WeightsMismatchError(f"parameter {name} has no Hugging Face counterpart")
    layout, names = _IN_A_LAYER[match[2]]
    return layout, tuple(f"model.layers.{int(match[1]) + first_layer}.{x}" for x in names)


@torch.no_grad()
def load_weights(model: PolicyModel, folder: Path) -> None:
    """Set every parameter of this rank's model from the safetensors of `folder`, in the model's dtype.

    Raises WeightsMismatchError, naming the tensor, when one is missing, has another shape, or is not used.
    """
    ranks, rank = model.pg_collection.tp.size(), model.pg_collection.tp.rank()
    padded = model.shape.padded_vocabulary(ranks)
    used: set[str] = set()
    with ExitStack() as stack:
        source = _Safetensors(folder, stack)
        for _, parameter, layout, names in _parameters(model):
            whole = layout.merge(model.shape, padded, [source.read(name) for name in names])
            part = layout.shard(whole, ranks, rank)
            if part.shape != parameter.shape:
                raise WeightsMismatchError(
                    f"{folder}: {', '.join(names)} make {list(part.shape)}, the model needs {list(parameter.shape)}"
                )
            parameter.copy_(part)
            used.update(names)
        _refuse_unused(model, folder, source.names - used)


def _refuse_unused(model: PolicyModel, folder: Path, unused: set[str]) -> None:
    if model.shape.tied:
        unused = unused - {"lm_head.weight"}
    unused = {name for name in unused if not name.endswith("rotary_emb.inv_freq")}
    if unused and model.pre_process and model.post_process:
        raise WeightsMismatchError(f"{folder}: {min(unused)} and {len(unused) - 1} more have no place in the model")


@torch.no_grad()
def export_weights(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight of this pipeline stage under its Hugging Face name, in the model's dtype, on its device.

    All tensor-parallel ranks must iterate together. A tensor may share memory with the parameter: it is
    valid until the weights change, and a consumer that keeps it makes a copy.
    """
    group = model.pg_collection.tp
    for _, parameter, layout, names in _parameters(model):
        parts = [parameter.detach()]
        if group.size() > 1 and layout is not REPLICATED:
            parts = [torch.empty_like(parameter) for _ in range(group.size())]
            dist.all_gather(parts, parameter.detach().contiguous(), group=group)
        yield from zip(names, layout.split(model.shape, layout.unshard(parts)), strict=True)


def _parameters(model: PolicyModel) -> Iterator[tuple[str, torch.nn.Parameter, Layout, tuple[str, ...]]]:
    layers = model.decoder.layers
    first_layer = layers[0].layer_number - 1 if len(layers) else 0
    for name, parameter in model.named_parameters():
        yield name, parameter, *layout_of(name, first_layer)


class _Safetensors:
    """The tensors of a folder by name, each read from its file when it is asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        paths = sorted(folder.glob("*.safetensors"))
        if (folder / _INDEX).is_file():
            files = json.loads((folder / _INDEX).read_text())["weight_map"].values()
            paths = [folder / name for name in sorted(set(files))]
        if not paths:
            raise WeightsMismatchError(f"model.path: {folder} has no safetensors file")
        self._folder = folder
        self._files: dict[str, Any] = {}
        for path in paths:
            file = stack.enter_context(safe_open(path, framework="pt"))
            self._files |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def read(self, name: str) -> Tensor:
        if name not in self._files:
            raise WeightsMismatchError(f"{self._folder}: tensor {name} is missing")
        return self._files[name].get_tensor(name)


def save_folder(weights: Iterator[tuple[str, Tensor]], source: Path, target: Path) -> None:
    """Write a Hugging Face folder: the weights as safetensors, everything else copied from `source`.

    Holds at most SHARD_BYTES of copies. `target` appears only when it is complete. A dtype other than the
    folder's own is what the safetensors say, whatever config.json does.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and not _NOT_COPIED.fullmatch(path.name):
            shutil.copy2(path, partial / path.name)
    _write_shards(weights, partial)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)


def _write_shards(weights: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """One `model.safetensors`, or numbered shards with an index when there is more than SHARD_BYTES."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total = pending_bytes = 0

    def write() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        if pending and pending_bytes + tensor.nbytes > SHARD_BYTES:
            write()
            pending_bytes = 0
        pending[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
    write()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{index}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))

"""Weights between a Hugging Face folder and a Megatron model, tensor by tensor, bitwise in both directions.

    safetensors ──each rank its slices──▶ join (q, k, v -> qkv) ──▶ parameter
    parameter ──▶ gather the parts ──▶ split (qkv -> q, k, v) ──▶ the first rank: (Hugging Face name, tensor)

Never is more than one parameter's worth of tensors held beside the model; of experts, one parameter of each
expert-parallel rank. Of a fully sharded model the first data-parallel rank gathers one parameter after another.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from streamrl.learner import shared_rows
from streamrl.learner.lora import Adapted, is_adapter_parameter
from streamrl.learner.mapping import Placement, is_unbuilt, named_weights, place, tensor_names
from streamrl.learner.model import PolicyModel
from streamrl.learner.shape import (
    FLOAT32,
    SHARD_BYTES,
    WEIGHTS_INDEX,
    ModelShape,
    WeightsMismatchError,
    open_weights,
    weight_files,
)
from streamrl.learner.value_model import HEAD
from streamrl.learner.whole import weights as whole_weights
from streamrl.learner.whole.model import WholeModel
from streamrl.observe.bars import Report, silent
from streamrl.types import PolicyVersion
from streamrl.whole_files import put_back, replace_folder, sync_folder

_NOT_COPIED = re.compile(r".*\.(safetensors|bin|pt|pth|gguf)|.*\.index\.json")

_DTYPE = ("dtype", "torch_dtype")  # names of config.json: transformers' own, and that of before its version 5


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter of this rank, the ranks that hold its other parts, and where it belongs."""

    module: torch.nn.Module
    parameter: Tensor  # or a buffer that a folder has
    at: Placement
    shape: ModelShape
    dtype: torch.dtype  # of what is exported; shards of a fully sharded model are float32
    shards: dist.ProcessGroup  # ranks over which one such parameter is cut
    parts: dist.ProcessGroup  # those, for each expert-parallel rank one after the other
    leading: bool  # this rank is in the group that the stage's first rank is in

    @property
    def effective(self) -> Tensor | None:
        """What the model computes with: of a layer with an adapter, the two merged. None: another rank has gathered it
        from the shards."""
        if isinstance(self.module, Adapted) and self.parameter is self.module.weight:
            return self.module.effective_weight()
        return shared_rows.whole(self.parameter, self.dtype)

    @property
    def takes_part(self) -> bool:
        """Does this rank give a part of it to an export?"""
        return self.leading or shared_rows.is_shared_out(self.parameter)

    def own_names(self) -> Sequence[str]:
        """The Hugging Face tensors that this rank's part is of."""
        return self._names()[self.parts.rank() // self.shards.size()]

    def tensors(self) -> list[tuple[str, list[int]]]:
        """Name and shape of each Hugging Face tensor that `gather` gives, in its order."""
        pieces = self.at.cut.split(self.shape, shared_rows.meta(self.parameter, self.dtype))
        wholes = [self.at.cut.whole_shape(self.shape, piece.shape, self.shards.size()) for piece in pieces]
        return [pair for names in self._names() for pair in zip(names, wholes, strict=True)]

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """The Hugging Face tensors, on the first rank of the parts' group; all of its ranks must call this."""
        for names, parts in zip(self._names(), self.parts_of_ranks(), strict=False):
            yield from zip(names, self.at.cut.whole(self.shape, parts), strict=True)

    @property
    def experts(self) -> list[int]:
        """Numbers in the layer of the experts that this parameter is of, on each expert-parallel rank."""
        assert self.at.expert is not None
        assert self.shape.moe is not None
        ranks = self.parts.size() // self.shards.size()
        each = self.shape.moe.experts // ranks
        return [rank * each + self.at.expert for rank in range(ranks)]

    @property
    def stack(self) -> tuple[int, int] | None:
        """Where this rank's part is in a tensor of all experts, and how many are in it; None: it is in none."""
        if not self.at.stacked:
            return None
        assert self.shape.moe is not None
        return self.experts[self.parts.rank() // self.shards.size()], self.shape.moe.experts

    def _names(self) -> list[Sequence[str]]:
        return [self.at.names] if self.at.expert is None else [self.at.names_of(expert) for expert in self.experts]

    def parts_of_ranks(self) -> list[list[Tensor]]:
        """The parts, in the order of the ranks, for each expert-parallel rank; empty on other ranks than the first."""
        part, ranks = self.effective, self.parts.size()
        if part is None:
            return []
        if ranks == 1 or (self.at.expert is None and self.at.cut.dim is None):
            return [[part]] if self.parts.rank() == 0 else []
        parts = [torch.empty_like(part) for _ in range(ranks)] if self.parts.rank() == 0 else None
        dist.gather(part.contiguous(), parts, group=self.parts, group_dst=0)
        each = self.shards.size()
        return [] if parts is None else [parts[first : first + each] for first in range(0, ranks, each)]


@dataclass(frozen=True, slots=True)
class _Stack:
    """A parameter of every expert that a rank has of a layer, in order: one tensor in a folder, [experts, ...]."""

    members: list[_Weight]

    def tensors(self) -> list[tuple[str, list[int]]]:
        first = self.members[0]
        assert first.shape.moe is not None
        ranks = len(first.experts)
        each = first.tensors()[: len(first.at.names)]
        return [(name, [ranks * len(self.members), *whole]) for name, whole in each]

    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """As a weight's own `gather`."""
        found: dict[int, list[Tensor]] = {}
        for member in self.members:
            for expert, parts in zip(member.experts, member.parts_of_ranks(), strict=False):
                found[expert] = member.at.cut.whole(member.shape, parts)
        if found:
            for index, name in enumerate(self.members[0].at.names):
                yield name, torch.stack([found[expert][index] for expert in range(len(found))])


def _stacked(weights: Sequence[_Weight]) -> list[tuple[_Weight, _Weight | _Stack]]:
    """What gives tensors, each with one of its weights."""
    stacks: dict[tuple[str, ...], list[_Weight]] = {}
    for weight in weights:
        if weight.at.stacked:
            stacks.setdefault(weight.at.names, []).append(weight)
    first = {id(members[0]): _Stack(members) for members in stacks.values()}
    return [
        (weight, first.get(id(weight), weight)) for weight in weights if not weight.at.stacked or id(weight) in first
    ]


def _weights(chunks: Sequence[PolicyModel]) -> list[_Weight]:
    """Every weight of this rank but adapters and a critic's head, in the order of the layers."""
    weights = []
    for model in chunks:
        groups, shape = model.pg_collection, model.shape
        layers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in named_weights(model):
            if is_adapter_parameter(name) or name == HEAD:
                continue
            at = place(name, shape, layers)
            module = model.get_submodule(name.rpartition(".")[0])
            if at.expert is None:
                ranks = (groups.tp, groups.tp, groups.dp_cp.rank() == 0)
            else:
                ranks = (groups.expt_tp, groups.tp_ep, groups.expt_dp.rank() == 0)
            dtype = model.config.params_dtype if shared_rows.is_shared_out(parameter) else parameter.dtype
            weights.append(_Weight(module, parameter, at, shape, dtype, *ranks))
    return sorted(weights, key=lambda weight: weight.at.layer)


@torch.no_grad()
def load_weights(chunks: Sequence[PolicyModel], folder: Path, key: str = "model.path", report: Report = silent) -> None:
    """Set every parameter of this rank from the safetensors of `folder`, in the model's dtype.

    Of each tensor only the slice of this tensor-parallel rank is read. Raises WeightsMismatchError, naming the tensor,
    when one is missing, has another shape, or is not used; on every rank alike, but for a shape. key: of the
    configuration that names the folder. report: bytes of this rank's parameters that are set, of all.
    """
    if isinstance(chunks[0], WholeModel):
        whole_weights.load(chunks[0], folder, key, report)
        return
    with ExitStack() as stack:
        source = _Safetensors(folder, stack, key)
        source.refuse_others(chunks[0].shape)
        weights = _weights(chunks)
        done, total = 0, sum(shared_rows.local(weight.parameter).nbytes for weight in weights)
        for weight in weights:
            cut, ranks = weight.at.cut, weight.shards.size()
            pieces = []
            like = cut.split(weight.shape, shared_rows.meta(weight.parameter, weight.dtype))
            for index, (name, piece) in enumerate(zip(weight.own_names(), like, strict=True)):
                whole = cut.whole_shape(weight.shape, piece.shape, ranks)
                pieces.append(source.read(name, whole, piece.shape, weight, index))
            shared_rows.fill(weight.parameter, cut.join(weight.shape, pieces), weight.dtype)
            done += shared_rows.local(weight.parameter).nbytes
            report(done, total)


@torch.no_grad()
def export_weights(chunks: Sequence[PolicyModel]) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the whole model under its Hugging Face name, on the first rank; on the others nothing.

    All ranks must iterate together, to the end. The order is that of the layers, the same every time. Tensors
    are in the model's dtype, on its device, and may share memory with the parameters: they are valid until the
    weights change, and a consumer that keeps one makes a copy.
    """
    if isinstance(chunks[0], WholeModel):
        yield from whole_weights.export(chunks[0])
        return
    weights = [weight for weight in _weights(chunks) if weight.takes_part and not weight.at.copy]
    units = _stacked(weights)
    own = (pair for _, unit in units for pair in unit.gather())
    groups = chunks[0].pg_collection
    if groups.pp.size() == 1 or groups.tp.rank() > 0 or groups.dp_cp.rank() > 0:
        yield from own  # a rank that is not the first of its stage has a part in the gathering, and gets nothing
    else:
        listed = [
            (weight.at.layer, name, whole, weight.parameter.dtype)
            for weight, unit in units
            for name, whole in unit.tensors()
        ]
        yield from _over_stages(own, listed, weights[0].parameter.device, groups.pp)


def _over_stages(
    own: Iterator[tuple[str, Tensor]],
    listed: list[tuple[int, str, list[int], torch.dtype]],
    device: torch.device,
    stages: dist.ProcessGroup,
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all pipeline stages on the first of them, which receives one after the other.

    own: this stage's; listed: their (layer, name, shape, dtype), in the same order.
    """
    first = stages.rank() == 0
    lists: list[Any] | None = [None] * stages.size() if first else None
    dist.gather_object(listed, lists, group=stages, group_dst=0)
    if lists is None:
        for _, tensor in own:
            dist.send(tensor.contiguous(), group=stages, group_dst=0)
        return
    merged = [(*entry, stage) for stage, some in enumerate(lists) for entry in some]
    for _, name, whole, dtype, stage in sorted(merged, key=lambda entry: entry[0]):
        if stage == 0:
            yield next(own)
        else:
            tensor = torch.empty(whole, dtype=dtype, device=device)
            dist.recv(tensor, group=stages, group_src=stage)
            yield name, tensor


class _Safetensors:
    """The tensors of a folder by name, each slice read from its file when it is asked for."""

    def __init__(self, folder: Path, stack: ExitStack, key: str) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        for path in weight_files(folder, key):
            file = stack.enter_context(open_weights(path, key))
            self._files |= dict.fromkeys(file.keys(), file)

    def refuse_others(self, shape: ModelShape) -> None:
        """Raise WeightsMismatchError unless the folder's tensors are those of the model."""
        expected = set(tensor_names(shape))
        if missing := expected - self._files.keys():
            raise WeightsMismatchError(f"{self._folder}: tensor {min(missing)} is missing")
        unused = {name for name in self._files.keys() - expected if not name.endswith("rotary_emb.inv_freq")}
        unused -= {name for name in unused if is_unbuilt(name, shape)}
        if shape.tied:
            unused -= {"lm_head.weight"}
        if unused:
            raise WeightsMismatchError(
                f"{self._folder}: {min(unused)} and {len(unused) - 1} more have no place in the model"
            )

    def read(self, name: str, whole: list[int], piece: Sequence[int], weight: _Weight, index: int) -> Tensor:
        """The piece of a tensor of the shape `whole` that this rank's part of a weight has, with rows of zeros where it
        is short; `index`: its number among the weight's."""
        cut, ranks, rank, stack = weight.at.cut, weight.shards.size(), weight.shards.rank(), weight.stack
        dim = cut.dim
        stored = self._files[name].get_slice(name)
        needed = whole if stack is None else [stack[1], *whole]
        if stored.get_shape() != needed:
            raise WeightsMismatchError(
                f"{self._folder}: tensor {name} is {stored.get_shape()}, the model needs {needed}"
            )
        if stack is not None:
            return cut.piece(stored[stack[0] : stack[0] + 1][0], rank, ranks, index)
        if dim is None:
            return stored[:]
        if len(cut.blocks) > 1:
            return torch.cat([stored[first:last] for first, last in cut.rows(whole[0], rank, ranks, index)])
        first, last = (min(place * piece[dim], whole[dim]) for place in (rank, rank + 1))
        if dim == 1:
            return stored[:, first:last]
        rows = stored[first:last]
        return pad(rows, (0, 0) * (rows.dim() - 1) + (0, piece[0] - len(rows)))


def export_folder(
    chunks: Sequence[PolicyModel], source: Path, target: Path, version: PolicyVersion | None = None
) -> None:
    """`save_folder` of what `export_weights` gives, by the first rank. All ranks call."""
    weights = export_weights(chunks)
    if dist.get_rank() == 0:
        save_folder(weights, source, target, version)
    else:
        deque(weights, maxlen=0)


def save_folder(
    weights: Iterator[tuple[str, Tensor]], source: Path, target: Path, version: PolicyVersion | None = None
) -> None:
    """Write a Hugging Face folder: the weights as safetensors, everything else copied from `source`.

    Holds at most SHARD_BYTES of copies. `target` appears only when it is complete and on disk; a former one stays
    until then. config.json names the dtype of the weights. `version`: what the weights are, in the metadata of the
    safetensors.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    put_back(target)
    copy_description(source, partial)
    dtype = _write_shards(weights, partial, {} if version is None else {"version": str(version)})
    _name_dtype(partial / "config.json", dtype)
    sync_folder(partial)
    replace_folder(target, partial, durable=True)


def copy_description(source: Path, target: Path) -> None:
    """Make the folder `target` with all of a Hugging Face folder that is no weight: config.json, tokenizer, ..."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and not _NOT_COPIED.fullmatch(path.name):
            shutil.copyfile(path, target / path.name)  # without its mode: a folder may be read-only, and is written on


def _name_dtype(description: Path, dtype: torch.dtype | None) -> None:
    """A config.json that names another dtype than the weights have would have them rounded when they are loaded."""
    fields = json.loads(description.read_text())
    wrong = {name for name in _DTYPE if fields.get(name) is not None} if dtype is not None else set()
    changed = fields | dict.fromkeys(wrong, str(dtype).removeprefix("torch."))
    if changed != fields:
        description.write_text(json.dumps(changed, indent=2) + "\n")


def _write_shards(weights: Iterator[tuple[str, Tensor]], folder: Path, metadata: dict[str, str]) -> torch.dtype | None:
    """One `model.safetensors`, or numbered shards with an index when there is more than SHARD_BYTES.

    Returns the dtype of all weights but those that are always float32; None where there are several.
    """
    shards: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    pending: dict[str, Tensor] = {}
    total = pending_bytes = 0

    def write() -> None:
        save_file(pending, folder / f"shard-{len(shards)}", metadata={"format": "pt", **metadata})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in weights:
        if pending and pending_bytes + tensor.nbytes > SHARD_BYTES:
            write()
            pending_bytes = 0
        pending[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        if not name.endswith(FLOAT32):
            dtypes.add(tensor.dtype)
        pending_bytes += tensor.nbytes
        total += tensor.nbytes
    write()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return _only(dtypes)
    weight_map: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{index}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    listed = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / WEIGHTS_INDEX).write_text(json.dumps(listed, indent=2))
    return _only(dtypes)


def _only(dtypes: set[torch.dtype]) -> torch.dtype | None:
    return dtypes.pop() if len(dtypes) == 1 else None

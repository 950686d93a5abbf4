"""A family's tables of names at work: the Hugging Face tensors of each parameter, and how it is cut over ranks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from streamrl.learner.families.base import EMBEDDING, OUTPUT, ModelFamily
from streamrl.learner.shape import FLOAT32, ModelShape, WeightsMismatchError
from streamrl.learner.vision.shape import TOWER


@dataclass(frozen=True, slots=True)
class Cut:
    """How a rank's part of a parameter is made of its parts of the Hugging Face tensors.

    Every Hugging Face tensor is cut along `dim` into equal pieces, one for each tensor-parallel rank. `join` makes
    the parameter's part of the pieces of one rank; `split` is the reverse.
    """

    dim: int | None  # None: every rank has the whole
    join: Callable[[ModelShape, Sequence[Tensor]], Tensor]
    split: Callable[[ModelShape, Tensor], Sequence[Tensor]]
    vocabulary: bool = False  # rows are tokens: Megatron has pads behind them, Hugging Face has none
    turned: bool = False  # the parameter is the transpose of the tensor
    # The tensor is blocks along `dim` of sizes in this proportion, and each of them is cut over the ranks.
    blocks: tuple[int, ...] = (1,)
    blocks_of: Callable[[ModelShape], tuple[int, ...]] | None = None  # where they depend on the model
    blocked: int | None = None  # so many tensors, the first ones, have those blocks, others have one; None: all

    def of(self, shape: ModelShape) -> Cut:
        """With the blocks of this model."""
        return self if self.blocks_of is None else replace(self, blocks=self.blocks_of(shape), blocks_of=None)

    @property
    def along(self) -> int | None:
        """The dimension of the parameter that is cut."""
        return self.dim if self.dim is None or not self.turned else 1 - self.dim

    def whole_shape(self, shape: ModelShape, piece: Sequence[int], ranks: int) -> list[int]:
        """The shape of a Hugging Face tensor of which `ranks` ranks have such a piece."""
        whole = list(piece)
        if self.vocabulary:
            whole[0] = shape.vocabulary
        elif self.dim is not None:
            whole[self.dim] *= ranks
        return whole

    def whole(self, shape: ModelShape, parts: Sequence[Tensor]) -> list[Tensor]:
        """The Hugging Face tensors of a parameter's parts, those of all tensor-parallel ranks in their order."""
        pieces = zip(*(self.split(shape, part) for part in parts), strict=True)
        if self.dim is None or len(parts) == 1:
            wholes = [first for first, *_ in pieces]
        else:
            wholes = [self._together(of_ranks, self.dim, index) for index, of_ranks in enumerate(pieces)]
        return [whole[: shape.vocabulary] for whole in wholes] if self.vocabulary else wholes

    def piece(self, whole: Tensor, rank: int, ranks: int, index: int = 0) -> Tensor:
        """The piece of a Hugging Face tensor that one of the ranks has; `index`: its number among the parameter's."""
        if self.dim is None:
            return whole
        return torch.cat([block.chunk(ranks, self.dim)[rank] for block in self._blocks(whole, index)], self.dim)

    def rows(self, whole: int, rank: int, ranks: int, index: int = 0) -> list[tuple[int, int]]:
        """First and last row, excluded, of each of its blocks, of `whole` rows that the ranks divide."""
        sizes = self._sizes(whole, index)
        blocks = zip(itertools.accumulate(sizes, initial=0), (size // ranks for size in sizes), strict=False)
        return [(start + rank * each, start + (rank + 1) * each) for start, each in blocks]

    def _together(self, of_ranks: Sequence[Tensor], dim: int, index: int) -> Tensor:
        blocks = zip(*(self._blocks(piece, index) for piece in of_ranks), strict=True)
        return torch.cat([part for of_block in blocks for part in of_block], dim)

    def _blocks(self, tensor: Tensor, index: int) -> Sequence[Tensor]:
        return tensor.split(self._sizes(tensor.size(self.dim or 0), index), self.dim or 0)

    def _sizes(self, whole: int, index: int) -> list[int]:
        if self.blocked is not None and index >= self.blocked:
            return [whole]
        return [whole * block // sum(self.blocks) for block in self.blocks]


def _one(_: ModelShape, pieces: Sequence[Tensor]) -> Tensor:
    (piece,) = pieces
    return piece


def _alone(_: ModelShape, part: Tensor) -> list[Tensor]:
    return [part]


def _join_qkv(shape: ModelShape, pieces: Sequence[Tensor]) -> Tensor:
    """Megatron keeps the heads of a query group together: [q, ..., q, k, v] for each group."""
    groups = pieces[1].size(0) // shape.head_dim
    return torch.cat([piece.unflatten(0, (groups, -1)) for piece in pieces], 1).flatten(0, 1)


def _split_qkv(shape: ModelShape, part: Tensor) -> list[Tensor]:
    query = shape.heads // shape.groups * shape.head_dim
    grouped = part.unflatten(0, (-1, query + 2 * shape.head_dim))
    return [piece.flatten(0, 1) for piece in grouped.split([query, shape.head_dim, shape.head_dim], 1)]


def _join_rows(_: ModelShape, pieces: Sequence[Tensor]) -> Tensor:
    """Each rank holds its rows of the gate above its rows of the up projection."""
    return torch.cat(list(pieces))


def by_group(
    blocks: Callable[[ModelShape], tuple[int, ...]],
    groups: Callable[[ModelShape], int],
    others: Callable[[ModelShape], tuple[int, ...]] = lambda _: (),
) -> Cut:
    """For rows that are of groups of heads: a parameter has those of a group together, of all of its tensors, so that
    the part of a rank is a slice of the whole.

    blocks: rows of the first tensor, in blocks that each are of all groups in order; others: rows of each further one.

    Example: with blocks of 4 and 2 rows and 2 groups, rows 0 1 2 3 | 4 5 become 0 1 4 | 2 3 5.
    """

    def of_group(shape: ModelShape, rows: tuple[int, ...]) -> list[int]:
        return [each // groups(shape) for each in rows]

    def join(shape: ModelShape, pieces: Sequence[Tensor]) -> Tensor:
        first = of_group(shape, blocks(shape))
        count = pieces[0].size(0) // sum(first)  # groups of this rank
        parts = [*pieces[0].split([count * rows for rows in first]), *pieces[1:]]
        return torch.cat([part.unflatten(0, (count, -1)) for part in parts], 1).flatten(0, 1)

    def split(shape: ModelShape, part: Tensor) -> list[Tensor]:
        first, further = of_group(shape, blocks(shape)), of_group(shape, others(shape))
        grouped = part.unflatten(0, (-1, sum(first) + sum(further)))
        parts = [each.flatten(0, 1) for each in grouped.split([*first, *further], 1)]
        return [torch.cat(parts[: len(first)]), *parts[len(first) :]]

    return Cut(0, join, split, blocks_of=blocks, blocked=1)


REPLICATED = Cut(None, _one, _alone)
COLUMNS = Cut(1, _one, _alone)
QKV = Cut(0, _join_qkv, _split_qkv)
ROWS = Cut(0, _one, _alone)
GATE_AND_UP = Cut(0, _join_rows, lambda _, part: part.chunk(2))
# The same of one tensor with the gate above the up projection, of which every rank reads its two parts.
GATE_UP = Cut(0, _one, _alone, blocks=(1, 1))
VOCABULARY = Cut(0, _one, _alone, vocabulary=True)

CUTS: Mapping[str, Cut] = {
    "replicated": REPLICATED,
    "columns": COLUMNS,
    "rows": ROWS,
    "qkv": QKV,
    "gate_and_up": GATE_AND_UP,
    "gate_up": GATE_UP,
    "vocabulary": VOCABULARY,
}
BUFFERS = FLOAT32  # ends of the names of buffers that a folder has
OF_TRANSFORMERS = "inner."  # in the names of a model that transformers builds: a folder has all buffers that are kept

_ENGINE_NAMES = {  # Transformer Engine keeps a norm inside the linear layer that follows it
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERTS = (  # one module an expert, or all in one (Transformer Engine)
    re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<linear>linear_fc[12](\.bias)?)(\.weight)?"),
    re.compile(r"mlp\.experts\.(?P<linear>linear_fc[12])\.weight(?P<expert>\d+)"),
)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a parameter belongs in the Hugging Face model."""

    cut: Cut
    names: tuple[str, ...]  # Hugging Face; of an expert with {} in place of its number
    layer: int  # counted from 0; -1 before the layers, the number of layers behind them
    expert: int | None = None  # number among the experts of this rank
    copy: bool = False  # of the embedding, on the last pipeline stage of a tied model

    @property
    def stacked(self) -> bool:
        """Whether the tensors are of all experts of the layer, [experts, ...]."""
        return self.expert is not None and is_stack(self.names)

    def names_of(self, expert: int) -> list[str]:
        """The Hugging Face names, for an expert counted over the whole layer."""
        return [name.format(expert) for name in self.names]


def is_stack(names: Sequence[str]) -> bool:
    """Whether tensors of an expert by these names are of all experts: no number is in them."""
    return not any("{}" in name for name in names)


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a folder has of a model chunk, by Megatron's names: its parameters, adapters too, and some buffers."""
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(BUFFERS) or (OF_TRANSFORMERS in name and _is_kept(model, name)):
            yield name, buffer


def _is_kept(model: nn.Module, name: str) -> bool:
    """Whether a buffer is in the state of its module."""
    owner, _, own = name.rpartition(".")
    return own not in model.get_submodule(owner)._non_persistent_buffers_set


def is_unbuilt(name: str, shape: ModelShape) -> bool:
    """Is this a tensor of what is in a folder and not in the model?"""
    if name.startswith(shape.family.unbuilt):
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and shape.layers <= int(match[1]) < shape.layers + shape.unbuilt_layers


def place(name: str, shape: ModelShape, layer_numbers: Sequence[int]) -> Placement:
    """Where parameter `name` of a model chunk belongs, whose layers are `layer_numbers`, counted from 0.

    Raises WeightsMismatchError for one that no Hugging Face model has.

    Usage:
        place("decoder.layers.0.mlp.linear_fc2.weight", shape, [12, 13]).names
        # ('model.layers.12.mlp.down_proj.weight',)
    """
    family = shape.family
    cuts = {**CUTS, **family.cuts()}
    if name == OUTPUT and shape.tied:
        cut, names = family.outside_layers[EMBEDDING]
        return Placement(cuts[cut].of(shape), names, layer=shape.layers, copy=True)
    if name in family.outside_layers:
        cut, names = family.outside_layers[name]
        return Placement(cuts[cut].of(shape), names, layer=-1 if name == EMBEDDING else shape.layers)
    if shape.vision is not None and name.startswith(TOWER):
        return Placement(REPLICATED, (family.vision_prefix + name.removeprefix(TOWER),), layer=-1)
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, inner = layer_numbers[int(match[1])], _ENGINE_NAMES.get(match[2], match[2])
        if inner in family.in_a_layer:
            cut, names = family.in_a_layer[inner]
            return Placement(cuts[cut].of(shape), _in_layer(family, layer, names), layer)
        for pattern in _EXPERTS:
            if (expert := pattern.fullmatch(inner)) is not None:
                cut, names = family.in_an_expert[expert["linear"]]
                return Placement(cuts[cut].of(shape), _in_layer(family, layer, names), layer, int(expert["expert"]))
    raise WeightsMismatchError(f"parameter {name} has no Hugging Face counterpart")


def tensor_names(shape: ModelShape) -> Iterator[str]:
    """The name of every tensor that a folder with this model has."""
    family = shape.family
    for name, (_, names) in family.outside_layers.items():
        if not (shape.tied and name == OUTPUT):
            yield from names
    if shape.vision is not None:
        yield from (family.vision_prefix + name for name in shape.vision.tensors)
    for layer in range(shape.layers):
        experts = 0 if shape.moe is None or layer in shape.moe.dense_layers else shape.moe.experts
        for name, (_, names) in family.in_a_layer.items():
            if family.has_in_layer(shape, layer, name, experts > 0):
                yield from _in_layer(family, layer, names)
        for expert in range(experts):
            for _, names in family.in_an_expert.values():
                if expert and is_stack(names):
                    continue
                yield from (name.format(expert) for name in _in_layer(family, layer, names))


def _in_layer(family: type[ModelFamily], layer: int, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{family.layers_prefix}{layer}.{name}" for name in names)

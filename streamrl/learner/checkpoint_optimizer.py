"""The distributed optimizer's state in a checkpoint: every rank describes what it holds, and nothing is gathered.

A rank holds a range of each flattened parameter of its model-parallel part; such a range is a few boxes of the
parameter:

    parameter [4, 3], range 2..10      ..A      A: the end of a row
                                       BBB      B: whole rows
                                       BBB
                                       C..      C: the beginning of a row

The boxes of all ranks are the parameter. Their names, dtypes and global shapes are those of Megatron-Core's format
`fully_reshardable`, so that Megatron reads these checkpoints, and its own are read here. Megatron writes that format by
gathering: either every data-parallel rank has all of the state of its model-parallel part in host memory, 12 bytes a
parameter, or the first of them has, over gloo, and writes it alone. Its `dp_reshardable` gathers nothing, but cannot be
read in another tensor- or pipeline-parallel layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

# The format whose describing and loading methods are replaced.
FORMAT = "fully_reshardable"

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offset, size


def install(optimizer: MegatronOptimizer) -> None:
    """Let the distributed ones of these optimizers describe and load `FORMAT` as said above. Again does nothing."""
    for part in optimizer.chained_optimizers:
        if isinstance(part, DistributedOptimizer) and not part.is_stub_optimizer:
            part.sharded_param_state_fully_reshardable = partial(_described, part)
            part.load_parameter_state_from_fully_reshardable = partial(_load, part)
            part._set_main_param_and_optimizer_states = partial(_set, part)


def boxes(start: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    """The boxes that are the values `start` up to `end` of a flattened tensor of `shape`, in their order.

    Each is one stretch of the flattened tensor; there are at most 2 x dimensions - 1.

    Example: `list(boxes(2, 10, (4, 3)))` is `[((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]`.
    """
    if start >= end:
        return
    if len(shape) <= 1:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if start < min(end, first * row):
        within = (first - 1) * row
        yield from _in_row(first - 1, boxes(start - within, min(end, first * row) - within, shape[1:]))
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    if max(start, last * row) < end and first <= last:
        yield from _in_row(last, boxes(0, end - last * row, shape[1:]))


def _in_row(row: int, parts: Iterator[Box]) -> Iterator[Box]:
    for offset, size in parts:
        yield (row, *offset), (1, *size)


def _described(
    part: DistributedOptimizer,
    weights: dict[str, Any],
    is_loading: bool = False,
    metadata: dict[str, Any] | None = None,
) -> dict[int, dict[str, dict[int, ShardedTensor]]]:
    """In place of `sharded_param_state_fully_reshardable`: parameter of this rank -> kind of state -> its boxes.

    The tensors are views of the optimizer's own, except where it keeps a state scaled in a smaller dtype.
    """
    models, _ = extract_sharded_tensors_and_factories(weights)
    of_parameter = {sharded.data: sharded for sharded in nested_values(models)}
    found = {}
    for index, (parameter, held) in enumerate(_ranges(part)):
        states = part._get_main_param_and_optimizer_states(parameter)
        found[index] = {
            kind: dict(enumerate(cut(key_of(kind), state, held.start, of_parameter[parameter])))
            for kind, state in states.items()
            if kind != "step"  # one number, which the parameter groups have
        }
    return found


def _load(part: DistributedOptimizer, loaded: dict[int, dict[str, dict[int, Tensor]]]) -> None:
    """In place of `load_parameter_state_from_fully_reshardable`."""
    with torch.no_grad():
        for index, (parameter, _) in enumerate(_ranges(part)):
            part._set_main_param_and_optimizer_states(
                parameter, {kind: joined(pieces) for kind, pieces in loaded[index].items()}
            )
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            part.optimizer._sync_hdo_state_to_sub_optimizers()


def _set(part: DistributedOptimizer, parameter: torch.nn.Parameter, tensors: dict[str, Tensor]) -> None:
    """In place of the method of that name: torch's Adam has a `step` besides, which Megatron does not save there."""
    group, order = part.model_param_group_index_map[parameter]
    state = part.optimizer.state[part.optimizer.param_groups[group]["params"][order]]
    own = {"step": state["step"]} if "step" in state else {}
    DistributedOptimizer._set_main_param_and_optimizer_states(part, parameter, own | tensors)


def _ranges(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """The parameters of which this rank has a range, and the range, in an order that is always the same."""
    for buffer in part.gbuf_ranges:
        for bucket in chain.from_iterable(buffer.values()):
            for parameter, ranges in bucket["param_map"].items():
                yield parameter, ranges["param"]


def key_of(kind: str) -> str:
    """What comes before a weight's name in the name of a state of it, such as "exp_avg"."""
    return f"optimizer.state.{kind}."


def joined(pieces: dict[int, Tensor]) -> Tensor:
    """The values of the boxes of `cut`, in their order, flattened."""
    flat = [pieces[number].view(-1) for number in sorted(pieces)]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def cut(key: str, state: Tensor, start: int, weight: ShardedTensor | ShardedTensorFactory) -> Iterator[ShardedTensor]:
    """The boxes of a state of the values from `start` on of a flattened parameter, whose weight is so described.

    key: what comes before the weight's name in the state's; "" for the weight itself.
    """
    flat = state.detach().view(-1)
    for block, begin in _blocks(weight):
        first, last = max(start, begin), min(start + flat.numel(), begin + math.prod(block.local_shape))
        lead = (1,) * block.prepend_axis_num
        for offset, size in boxes(first - begin, last - begin, block.local_shape):
            values = flat[first - start : first - start + math.prod(size)].view(*lead, *size)
            first += math.prod(size)
            yield ShardedTensor(
                key=f"{key}{block.key}",
                data=values,
                dtype=values.dtype,
                local_shape=tuple(values.shape),
                global_shape=block.global_shape,
                global_offset=tuple(
                    whole + own for whole, own in zip(block.global_offset, (*(0,) * len(lead), *offset), strict=True)
                ),
                axis_fragmentations=None,  # no regular grid
                replica_id=(*block.replica_id[:2], 0),  # no other data-parallel rank has it
                allow_shape_mismatch=block.allow_shape_mismatch,
            )


def _blocks(weight: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """The parts of a parameter that are stored apart, such as gate and up of an MLP, and where each begins in it."""
    if isinstance(weight, ShardedTensor):
        yield weight, 0
        return
    imagined = torch.empty(weight.data.shape, dtype=weight.data.dtype, device="meta")
    for block in nested_values(weight.build_fn(weight.key, imagined, weight.replica_id, None)):
        if not block.data.is_contiguous():
            raise NotImplementedError(f"{weight.key} is stored in parts that are no stretches of it")
        yield block, block.data.storage_offset()

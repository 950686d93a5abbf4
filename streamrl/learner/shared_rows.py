"""A weight that data-parallel ranks may have shared out by its rows: this rank's part, and the whole one.

    rows of a weight [5, n] over 4 ranks, ceil(5 / 4) each:   0 1 | 2 3 | 4 | -

A weight of a fully sharded model (`fully_sharded.py`) is a DTensor while no pass runs; every other one is whole on each
rank, and goes through these functions as it is.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def is_shared_out(weight: Tensor) -> bool:
    """Has this rank a part of its rows?"""
    return isinstance(weight, DTensor)


def local(weight: Tensor) -> Tensor:
    """This rank's part, which shares memory with the weight; without a gradient's history."""
    return weight._local_tensor.detach() if isinstance(weight, DTensor) else weight.detach()


def first_value(weight: Tensor) -> int:
    """Where this rank's part begins in the flattened weight."""
    if not isinstance(weight, DTensor):
        return 0
    first = min(weight.device_mesh.get_local_rank() * _rows(weight), weight.size(0))
    return first * (weight.numel() // weight.size(0))


def meta(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the shape of the whole weight, without values."""
    return torch.empty(weight.shape, dtype=dtype, device="meta")


@torch.no_grad()
def fill(weight: Tensor, values: Tensor, dtype: torch.dtype) -> None:
    """Set this rank's part from the values of the whole weight, rounded to the model's dtype."""
    if not isinstance(weight, DTensor):
        weight.copy_(values)
        return
    part, first = local(weight).view(-1), first_value(weight)
    part.copy_(values.reshape(-1)[first : first + len(part)].to(dtype))


@torch.no_grad()
def whole(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The whole weight, on the first of the ranks that share it out and in the model's dtype; None on the others.

    It may share memory with the weight. Collective over those ranks; each sends its own rows, and the first one holds
    this weight alone besides.
    """
    if not isinstance(weight, DTensor):
        return weight.detach()
    part, group = local(weight).to(dtype), weight.device_mesh.get_group()
    if group.size() == 1:
        return part
    rows = _rows(weight)
    if len(part) < rows:
        part = torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])
    if group.rank() > 0:
        dist.gather(part, group=group, group_dst=0)
        return None
    together = part.new_empty(rows * group.size(), *part.shape[1:])
    dist.gather(part, list(together.split(rows)), group=group, group_dst=0)
    return together[: weight.size(0)]


def _rows(weight: DTensor) -> int:
    """Rows of each rank but the last ones, as torch.chunk cuts."""
    return -(-weight.size(0) // weight.device_mesh.size())

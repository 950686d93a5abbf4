"""A fully sharded model and its optimizer in a checkpoint: every rank describes its rows, and nothing is gathered.

The rows of a rank are a stretch of each flattened weight, of which `checkpoint_optimizer.cut` makes boxes. Names,
dtypes and global shapes are those of a model whose optimizer alone is shared out, and so is what is stored beside the
tensors: either reads what the other has written, with any number of ranks.

    decoder...weight                       in the model's dtype: the shard, rounded
    optimizer.state.param.decoder...       the shard, float32
    optimizer.state.exp_avg.decoder...     and exp_avg_sq: moments of the shard
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import param_group_identifier_keys
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from streamrl.learner.checkpoint_optimizer import FORMAT, cut, joined, key_of
from streamrl.learner.model import PolicyModel
from streamrl.learner.shared_rows import first_value, local, meta

# Of a state's kinds the one that is the shard itself; others are Adam's, except the count of updates.
_SHARD, _COUNT = "param", "step"


def describe(
    model: PolicyModel, shards: Mapping[str, nn.Parameter], optimizer: MegatronOptimizer, metadata: dict[str, Any]
) -> tuple[dict[str, Any], dict[Any, Any]]:
    """(weights, optimizer) of this rank, as Megatron's `sharded_state_dict`s of both are. Collective.

    model: a chunk that `FullySharded` is around, between two passes; shards: its, by name. Every state of the optimizer
    has been made.
    """
    dtype = model.config.params_dtype
    with _whole(model, dtype):
        described: dict[str, Any] = model.sharded_state_dict(metadata=metadata)
    first = {name: first_value(weight) for name, weight in model.named_parameters()}
    weights = {name: value for name, value in described.items() if name not in first}
    for name, weight in model.named_parameters():
        if name in shards:
            rounded = local(weight).to("cpu", dtype)
            weights[name] = dict(enumerate(cut("", rounded, first[name], described[name])))
    of_shard = {shard: name for name, shard in shards.items()}
    parts: dict[Any, Any] = {}
    for index, part in enumerate(optimizer.chained_optimizers):
        named = [(of_shard[shard], shard) for shard in part.get_parameters()]
        states = {
            name: {
                kind: dict(enumerate(cut(key_of(kind), state, first[name], described[name])))
                for kind, state in _states(part, shard).items()
            }
            for name, shard in named
        }
        parts[index] = {
            "optimizer": {"param_groups": _groups(part)},
            "param_state": states,
            "param_state_sharding_type": FORMAT,
        }
    return weights, parts[0] if len(parts) == 1 else parts


@torch.no_grad()
def restore(
    model: PolicyModel,
    shards: Mapping[str, nn.Parameter],
    optimizer: MegatronOptimizer,
    weights: dict[str, Any],
    loaded: dict[Any, Any],
) -> None:
    """Set shards, buffers and the optimizer's state from what dist_checkpointing loaded for `describe`."""
    for name, shard in shards.items():
        if not shard.requires_grad:  # what is trained has its float32 values in the optimizer's state
            _copy(shard, weights[name])
    for name, buffer in model.named_buffers():
        if isinstance(weights.get(name), Tensor):
            buffer.copy_(weights[name])
    of_shard = {shard: name for name, shard in shards.items()}
    chained = optimizer.chained_optimizers
    of_parts = [loaded] if len(chained) == 1 else [loaded[index] for index in range(len(chained))]
    for part, given in zip(chained, of_parts, strict=True):
        groups = {_identity(group): group for group in given["optimizer"]["param_groups"]}
        for group in part.optimizer.param_groups:
            taken = dict(groups[_identity(group)])
            count = taken.pop(_COUNT, 0)
            group.update({key: value for key, value in taken.items() if key != "params"})
            for shard in group["params"]:
                for kind, state in _states(part, shard).items():
                    _copy(state, given["param_state"][of_shard[shard]][kind])
                if _COUNT in part.optimizer.state[shard]:
                    part.optimizer.state[shard][_COUNT].fill_(float(count))
            if not isinstance(part.optimizer, torch.optim.Adam):  # the others count by groups
                group[_COUNT] = int(count)


@contextmanager
def _whole(model: PolicyModel, dtype: torch.dtype) -> Iterator[None]:
    """Inside, each parameter is a tensor of the whole shape without values: Megatron describes those of a rank."""
    kept = [(module, name, each) for module in model.modules() for name, each in module._parameters.items()]
    kept = [(module, name, each) for module, name, each in kept if isinstance(each, DTensor)]
    try:
        for module, name, weight in kept:
            module._parameters[name] = nn.Parameter(meta(weight, dtype), requires_grad=weight.requires_grad)
        yield
    finally:
        for module, name, weight in kept:
            module._parameters[name] = weight


def _states(part: MegatronOptimizer, shard: nn.Parameter) -> dict[str, Tensor]:
    """The shard and Adam's moments of it, by their kinds."""
    state = part.optimizer.state[shard]
    return {_SHARD: shard.detach(), **{kind: value for kind, value in state.items() if kind != _COUNT}}


def _groups(part: MegatronOptimizer) -> list[dict[str, Any]]:
    """The parameter groups without their parameters, with the count of updates that all of them have."""
    groups = part.optimizer.param_groups
    counts = [float(state[_COUNT]) for state in part.optimizer.state.values() if _COUNT in state]
    counts += [group[_COUNT] for group in groups if _COUNT in group]
    count = counts[0] if counts else 0
    return [{key: value for key, value in {**group, _COUNT: count}.items() if key != "params"} for group in groups]


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one parameter group of an optimizer from the others."""
    return tuple(group[key] for key in param_group_identifier_keys)


def _copy(values: Tensor, boxes: dict[int, Tensor]) -> None:
    values.view(-1).copy_(joined(boxes))

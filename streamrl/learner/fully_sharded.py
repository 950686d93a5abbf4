"""Fully sharded data parallelism: torch's FSDP2 around a model, as Megatron's schedules and optimizer take a wrapper.

    between passes   float32 shards of parameters, gradients, moments: some rows on each data-parallel and context rank
    a unit's pass    its weights, gathered in the model's dtype ──▶ forward or backward ──▶ freed
                     its gradients ──reduce-scatter in float32, after each micro batch──▶ added to the shards'

A shard is the master weight that the optimizer updates; what a pass computes with is that shard, rounded. Gradients are
sums over ranks: the loss is divided by the counts of the whole step already.

FSDP2 comes from torch, because Megatron-Core's wrapper of it (0.16.1) asks for CUDA and does not take the call by which
Megatron's own schedules end a step, and Megatron-FSDP needs CUDA. Where there are GPUs, torch gathers the next unit
during a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from streamrl.device import Device
from streamrl.learner.shared_rows import is_shared_out, local


def units(model: nn.Module) -> list[nn.Module]:
    """The modules that are gathered one at a time: the layers, members of the outermost lists of a model.

    The rest, embedding, last norm and output layer, is one unit more, which is whole during a pass: the log-probs take
    the output layer's weight, and a tied embedding is both ends.
    """
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else units(child)
    return found


def is_fully_sharded(model: nn.Module) -> bool:
    """Has `FullySharded` been put around this model?"""
    return isinstance(model, FSDPModule)


class FullySharded(_BaseDataParallel):
    """A model whose `named_parameters` are this rank's shards: plain float32 leaves, `main_grad` beside them.

    Rows that a rank has none of are no parameter of it.
    """

    use_forward_hook = False  # as Megatron's DDP has it: no gather of parameters is left to a forward pass

    def __init__(self, module: nn.Module, model: nn.Module, dtype: torch.dtype, device: Device, config: Any) -> None:
        """Shard a model whose values are not set yet. Collective over all ranks.

        module: the model, or what Megatron wraps around it; dtype: of what a pass computes with; config: of Megatron,
        the model's. What the model has on the host is not read: the device has one whole unit at a time.
        """
        super().__init__(config, module)
        self.ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        attributes = {name: dict(vars(parameter)) for name, parameter in model.named_parameters()}
        _shard(model, dtype, device)
        self._shards: list[tuple[str, nn.Parameter, nn.Parameter]] = []  # name, shard, the parameter that it is of
        for name, parameter in model.named_parameters():
            if not local(parameter).numel():
                continue
            shard = nn.Parameter(local(parameter).fill_(torch.nan), requires_grad=parameter.requires_grad)
            vars(shard).update(attributes[name])
            self._shards.append((name, shard, parameter))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, under the names of the model's parameters."""
        yield from ((f"{prefix}.{name}" if prefix else name, shard) for name, shard, _ in self._shards)

    def zero_grad_buffer(self) -> None:
        """Forget the gradients: the next backward pass begins with its own."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Hand the summed gradients to the optimizer: `main_grad` of each trained shard, float32.

        Of a unit that no pass has taken it is 0.
        """
        for _, shard, parameter in self._shards:
            if shard.requires_grad:
                gradient = torch.zeros_like(shard) if parameter.grad is None else local(parameter.grad)
                shard.main_grad = gradient  # type: ignore[attr-defined]

    def free(self) -> None:
        """Let go of what a pass without a backward pass has left whole. Again does nothing."""
        root: FSDPModule = next(each for each in self.module.modules() if isinstance(each, FSDPModule))
        root.reshard()


def _shard(model: nn.Module, dtype: torch.dtype, device: Device) -> None:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    mesh = DeviceMesh.from_group(group, device.kind)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in (*units(model), model):
        for parameter in unit.parameters():
            if not is_shared_out(parameter):
                parameter.data = torch.empty_like(parameter, dtype=torch.float32, device=device.torch_device)
        fully_shard(unit, mesh=mesh, reshard_after_forward=unit is not model, mp_policy=policy)
    sharded: Sequence[FSDPModule] = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for each in sharded:
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)  # otherwise a sum is a product, of NCCL alone
    # Ranks reduce the same weights of a unit together: 0 from a rank whose pass has not used one.
    cast(FSDPModule, model).set_reduce_scatter_unused_params(True)

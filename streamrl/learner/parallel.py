"""The learner's ranks: torch.distributed, Megatron's parallel state, and small objects between them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.learner import LayoutConfig
from streamrl.device import Device, detect
from streamrl.engine.hardware import nccl_environment
from streamrl.learner import cpu_adapter

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the learner's ranks.

    Neighbours in rank are neighbours in the tensor-parallel group, then context, data and pipeline: with 8 ranks,
    tensor 2 and pipeline 2, ranks 0 and 1 cut the tensors of the first stage, and ranks 0 and 4 are one pipeline.
    """

    device: Device
    rank: int
    world: int
    control: dist.ProcessGroup  # gloo, for objects and for waiting, on every device
    files: dist.ProcessGroup  # gloo, for waiting for a rank that reads or writes large files
    shares: tuple[int, ...]  # data-parallel rank of every rank: which share of a batch it trains

    @classmethod
    def start(cls, config: Config) -> Ranks:
        """Join the ranks that torchrun started (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

        A process that is alone opens no port. Raises ConfigError when the number of ranks
        is not `learner.ranks`.
        """
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if world != config.learner.ranks:
            raise ConfigError(f"learner.ranks: {config.learner.ranks} is configured, {world} were started")
        device = detect(int(os.environ.get("LOCAL_RANK", "0")))
        device.select(config.learner.threads)
        os.environ.update(nccl_environment() if device.kind == "cuda" else {})
        cpu_adapter.install()
        timeout = timedelta(seconds=config.learner.collective_timeout)
        store = dist.HashStore() if world == 1 else None
        dist.init_process_group(device.backend, timeout=timeout, store=store, rank=rank, world_size=world)
        _cut(config.learner.layout, timeout)
        device.seed(config.run.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(config.run.seed)
        control = dist.new_group(backend="gloo", timeout=timeout)
        for_files = max(timeout, timedelta(seconds=config.checkpoint.timeout))
        files = dist.new_group(backend="gloo", timeout=for_files)
        shares: list[Any] = [None] * world
        dist.all_gather_object(shares, parallel_state.get_data_parallel_rank(), group=control)
        return cls(device, rank, world, control, files, tuple(shares))

    @property
    def layout(self) -> dict[str, int]:
        """The sizes of the parallel layout, as checkpoints record them."""
        return {
            "data_parallel": parallel_state.get_data_parallel_world_size(),
            "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_parallel": parallel_state.get_pipeline_model_parallel_world_size(),
            "virtual_pipeline": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
            "context_parallel": parallel_state.get_context_parallel_world_size(),
            "expert_parallel": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel": parallel_state.get_expert_tensor_parallel_world_size(),
        }

    def broadcast(self, value: Any) -> Any:
        """A small object of rank 0, on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def scatter(self, values: list[Any] | None) -> Any:
        """Rank 0's `values`, one for each data-parallel rank: the one of this rank."""
        box: list[Any] = [None]
        per_rank = None if values is None else [values[share] for share in self.shares]
        dist.scatter_object_list(box, per_rank, src=0, group=self.control)
        return box[0]

    def gather(self, value: Any, *, behind_files: bool = False) -> list[Any]:
        """A small object of every rank, by rank, on every rank. `behind_files` as in `barrier`."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._group(behind_files))
        return values

    def barrier(self, *, behind_files: bool = False) -> None:
        """Wait for all ranks; `behind_files`: for one that reads or writes the files of a model, which may take as long
        as `checkpoint.timeout` says where that is more than `learner.collective_timeout`."""
        dist.barrier(group=self._group(behind_files))

    def _group(self, behind_files: bool) -> dist.ProcessGroup:
        return self.files if behind_files else self.control

    def stop(self) -> None:
        """Leave the process groups. Safe to call when a peer is gone."""
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def from_last_stage(value: Value) -> Value:
    """A small object of the last pipeline stage, on every stage. Collective over the stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]


def fill_from_last_stage(tensor: Tensor) -> None:
    """Set a tensor to what it is on the last pipeline stage. Collective over the stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() > 1:
        dist.broadcast(tensor, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)


def _cut(layout: LayoutConfig, timeout: timedelta) -> None:
    """Megatron's process groups for this layout."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_stages,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),
        create_gloo_process_groups=False,
    )

"""The one place that knows which accelerator this machine has and what follows from it.

CUDA and CPU are supported. ROCm and Ascend NPU are refused here, with what is missing.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch


class UnsupportedAcceleratorError(RuntimeError):
    """This machine has an accelerator that streamrl cannot drive; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Device:
    """Where the tensors of this process live.

    Example: rank 3 of a node with 8 GPUs has `Device("cuda", 3)`; without a GPU it is `Device("cpu", 0)`.
    """

    kind: Literal["cuda", "cpu"]
    index: int

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.kind, self.index) if self.kind == "cuda" else torch.device("cpu")

    @property
    def backend(self) -> Literal["nccl", "gloo"]:
        """The process-group backend for tensors on this device."""
        return "nccl" if self.kind == "cuda" else "gloo"

    @property
    def distributed_optimizer(self) -> bool:
        """Whether Megatron's distributed optimizer is on unless the configuration says otherwise.

        On a CPU machine the ranks share one memory, so that splitting the optimizer's state saves nothing.
        """
        return self.kind == "cuda"

    def select(self, threads: int) -> None:
        """Make this the current device; `threads` is the number of CPU threads of a CPU device."""
        if self.kind == "cuda":
            torch.cuda.set_device(self.index)
        else:
            torch.set_num_threads(threads)

    def seed(self, seed: int) -> None:
        """Seed torch's generators of the host and of this device."""
        torch.manual_seed(seed)
        if self.kind == "cuda":
            torch.cuda.manual_seed(seed)

    def synchronize(self) -> None:
        """Wait until what this process computes on the device is done, so that a clock may be read.

        Copies and broadcasts of the publisher have streams of their own, and are not waited for.
        """
        if self.kind == "cuda":
            torch.cuda.current_stream(self.index).synchronize()

    def release_memory(self) -> None:
        """Give back what torch keeps for later: another process has the device next."""
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def memory(self) -> dict[str, int]:
        """Device memory in bytes, now and at its peak; empty on a CPU, whose memory the system counts."""
        if self.kind == "cpu":
            return {}
        return {
            "memory/allocated": torch.cuda.memory_allocated(self.index),
            "memory/peak": torch.cuda.max_memory_allocated(self.index),
        }

    def __str__(self) -> str:
        if self.kind == "cpu":
            return f"cpu ({torch.get_num_threads()} threads)"
        return f"cuda:{self.index} ({torch.cuda.get_device_name(self.index)})"


def detect(local_rank: int = 0) -> Device:
    """The device of the process with this rank on its machine.

    Raises UnsupportedAcceleratorError on ROCm, on Ascend NPU, and when there are fewer GPUs than local ranks.
    """
    if torch.version.hip is not None:
        raise UnsupportedAcceleratorError(
            f"ROCm {torch.version.hip}: not supported yet; missing are a ROCm build of Transformer Engine behind "
            "the model factory and tests of the RCCL weight broadcast. Use a CUDA or CPU build of torch"
        )
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise UnsupportedAcceleratorError(
                f"local rank {local_rank} has no GPU of its own, this machine has {count}"
            )
        return Device("cuda", local_rank)
    if importlib.util.find_spec("torch_npu") is not None:
        raise UnsupportedAcceleratorError(
            "Ascend NPU (torch_npu is installed): not supported yet; missing are an adapter of Megatron-Core to NPU "
            "kernels (as MindSpeed is), an HCCL weight broadcast and their tests. Use a CUDA or CPU machine"
        )
    return Device("cpu", 0)

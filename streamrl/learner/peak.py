"""The peak of a learner rank's device in FLOP/s, dense: configured, of the GPU's data sheet, or measured on a CPU."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Literal

import torch

from streamrl.config import Config
from streamrl.device import Device

# Dense peaks by words of torch's name of a GPU, the first that is in it: TFLOP/s in bfloat16 and in float32, without
# TF32, which torch does not use by itself. Source: NVIDIA's data sheet of each; figures with sparsity are halved.
GPUS: tuple[tuple[tuple[str, ...], dict[str, float]], ...] = (
    (("GB200",), {"bfloat16": 2500, "float32": 80}),
    (("B200",), {"bfloat16": 2250, "float32": 75}),
    (("GH200",), {"bfloat16": 989, "float32": 67}),
    (("H200", "NVL"), {"bfloat16": 835, "float32": 60}),
    (("H200",), {"bfloat16": 989, "float32": 67}),
    (("H100", "NVL"), {"bfloat16": 835, "float32": 60}),
    (("H100", "PCIe"), {"bfloat16": 756, "float32": 51}),
    (("H100",), {"bfloat16": 989, "float32": 67}),
    (("H800", "PCIe"), {"bfloat16": 756, "float32": 51}),
    (("H800",), {"bfloat16": 989, "float32": 67}),
    (("H20",), {"bfloat16": 148, "float32": 44}),
    (("A100",), {"bfloat16": 312, "float32": 19.5}),
    (("A800",), {"bfloat16": 312, "float32": 19.5}),
    (("A40",), {"bfloat16": 149.7, "float32": 37.4}),
    (("L40S",), {"bfloat16": 362, "float32": 91.6}),
    (("L4",), {"bfloat16": 121, "float32": 30.3}),
)

# Rows and columns of the measured product: large beside its overhead, 5 ms on a core of 50 GFLOP/s.
SIZE = 512

# Seconds of products at least and at most, and their number in between: the fastest counts, and processes that start
# meanwhile do not slow down every one of so many.
LEAST, MOST = 0.1, 0.5
PRODUCTS = 20


@dataclass(frozen=True, slots=True)
class Peak:
    """Example: `Peak(tflops=989.0, source="data sheet")`."""

    tflops: float
    source: Literal["configured", "data sheet", "measured"]


def peak_of(config: Config, device: Device) -> Peak | None:
    """The peak of one rank's device in the model's dtype; None for a GPU that the table does not have."""
    if (given := config.learner.peak_tflops) is not None:
        return Peak(given, "configured")
    if device.kind == "cpu":
        return Peak(measured(config.model.dtype, torch.get_num_threads()) / 1e12, "measured")
    tflops = data_sheet(torch.cuda.get_device_name(device.index), config.model.dtype)
    return None if tflops is None else Peak(tflops, "data sheet")


def data_sheet(name: str, dtype: str) -> float | None:
    """TFLOP/s of a GPU by torch's name of it.

    >>> data_sheet("NVIDIA H100 80GB HBM3", "bfloat16"), data_sheet("NVIDIA H100 PCIe", "bfloat16")
    (989, 756)
    """
    words = name.replace("-", " ").split()
    return next((peaks[dtype] for wanted, peaks in GPUS if set(wanted) <= set(words)), None)


@functools.cache
def measured(dtype: str, threads: int) -> float:
    """FLOP/s of square products of `threads` threads, the present number, on this CPU. Once a process."""
    factor = torch.full((SIZE, SIZE), 0.5, dtype=getattr(torch, dtype))  # draws nothing from torch's generator
    factor @ factor  # allocates, and picks a kernel
    taken: list[float] = []
    while not taken or sum(taken) < LEAST or (len(taken) < PRODUCTS and sum(taken) < MOST):
        began = time.perf_counter()
        factor @ factor
        taken.append(time.perf_counter() - began)
    return 2 * SIZE**3 / min(taken)

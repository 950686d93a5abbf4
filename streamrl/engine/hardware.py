"""What this machine computes with, found without importing torch: CUDA devices for the installed torch, or a CPU."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from pathlib import Path

DEVICES = Path("/dev")
CPUINFO = Path("/proc/cpuinfo")

# Of an x86 CPU: those with which torch multiplies bfloat16. Without them it computes in float32 and rounds each result.
BFLOAT16 = ("amx_bf16", "avx512_bf16")

# What a server and the learner, who meet in one NCCL group, must agree on: SGLang's own defaults, said at both ends.
NCCL_ENVIRONMENT = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}

# What SGLang must find in the environment of a server on a CPU; torch's compiler needs triton.
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCH_COMPILE_DISABLE": "1"}

WSL = "dxg"  # the one device of Windows' subsystem for Linux, behind which all of its GPUs are


def has_cuda() -> bool:
    """True where an NVIDIA device may be used, and torch is a build for CUDA: the worker never imports it."""
    return bool(visible_gpus()) and torch_cuda() is not None


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes.

    On Windows' subsystem for Linux without that variable it is the first one: there is no telling how many there are.
    """
    numbers = sorted(int(path.name[6:]) for path in DEVICES.glob("nvidia*") if path.name[6:].isdigit())
    present = tuple(map(str, numbers)) or (("0",) if (DEVICES / WSL).exists() else ())
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not present:
        return present
    names = [name.strip() for name in chosen.split(",")]
    hidden = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
    return tuple(names[:hidden])  # CUDA sees none behind the first that is no device


def nccl_environment() -> dict[str, str]:
    """`NCCL_ENVIRONMENT`, but for what this process's environment says, which both ends inherit."""
    return {name: os.environ.get(name, value) for name, value in NCCL_ENVIRONMENT.items()}


def bfloat16_instructions() -> str | None:
    """The instructions of this CPU that multiply bfloat16, such as `amx_bf16`; None without."""
    text = CPUINFO.read_text() if CPUINFO.exists() else ""
    flags = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return next((name for name in BFLOAT16 if flags and name in flags[1].split()), None)


@functools.cache
def torch_cuda() -> str | None:
    """The CUDA release of the installed torch, such as `13.0`; None for a build without, and without torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    version = Path(found.origin).with_name("version.py")
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", version.read_text(), re.MULTILINE)
    return match[1] if match else None


def cuda_libraries() -> str | None:
    """The folder of the CUDA runtime that the installed torch loads; None where it is none of Python's packages.

    The loader finds it for torch alone: what is preloaded needs it on its path, or is passed over.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    folders = sorted(Path(found.origin).parents[1].glob("nvidia/cu*/lib"))
    return next((str(folder) for folder in folders if any(folder.glob("libcudart.so*"))), None)

"""`streamrl doctor`: what is installed, which accelerators there are, and which paths a run would take."""

from __future__ import annotations

import importlib.util
import os
import platform
import warnings
from importlib import metadata

import torch
import zmq

from streamrl import __version__
from streamrl.config import Config
from streamrl.device import Device, UnsupportedAcceleratorError, detect
from streamrl.engine.server import server_arguments
from streamrl.engine.stand_ins import ABSENT_ON_CPU, install
from streamrl.learner.te import PACKAGE, te_problem

NEEDED = ("torch", "megatron-core", "sglang", "transformers", "pyzmq", "msgspec", "uvloop", "datasets", "wandb")
LAYERS = "megatron-core"  # without which nothing can be said of paths
CUDA_ONLY = ("transformer-engine", "sglang-kernel", "triton", "torchvision")


def main() -> int:
    """Print the findings. Returns 1 when something is missing that every run needs, or nothing can be driven."""
    print(f"streamrl {__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores")
    print("packages")
    missing = [name for name in NEEDED if not _print_version(name)]
    for name in CUDA_ONLY:
        _print_version(name, note="(for CUDA)")
    print(f"  {'libzmq':<20} {zmq.zmq_version()}")
    for name in missing:
        print(f"MISSING {name}: make venv, or pip install -e '.[gpu]' on a GPU machine")
    if importlib.util.find_spec(PACKAGE) and (problem := te_problem()):
        print(f"BROKEN Transformer Engine {problem}: install requirements/gpu-no-deps.txt as docs/gpu.md says")
        return 1  # with half of it installed Megatron-Core cannot be imported either
    try:
        device = detect()
    except UnsupportedAcceleratorError as error:
        print(f"REFUSED {error}")
        return 1
    if LAYERS not in missing:
        _print_paths(device)
    return 1 if missing else 0


def _print_version(name: str, note: str = "") -> bool:
    """One line for a package; False when it is not installed."""
    try:
        print(f"  {name:<20} {metadata.version(name)}")
    except metadata.PackageNotFoundError:
        print(f"  {name:<20} not installed {note}".rstrip())
        return False
    return True


def _print_paths(device: Device) -> None:
    """Which of the alternatives a run on this machine takes, and why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns about Transformer Engine, which is reported below
        from streamrl.learner.cpu_adapter import MEGATRON_VERSION
        from streamrl.learner.model import choose_layers

    print("paths")
    print(f"  device               {device}")
    for dtype in (torch.bfloat16, torch.float32):
        print(f"  layers in {str(dtype).removeprefix('torch.'):<10} {choose_layers(device, dtype)}")
    print(
        "  transformers' models  whole on every rank, data parallel; attention as that of local layers where it can be"
    )
    adapter = f"Megatron-Core {MEGATRON_VERSION} through the CPU adapter" if device.kind == "cpu" else "not needed"
    print(f"  CPU adapter          {adapter}")
    print(f"  optimizer            {'distributed' if device.distributed_optimizer else 'not distributed'}")
    print(f"  publishing           broadcast over {device.backend}")
    stood_in = install(ABSENT_ON_CPU) if device.kind == "cpu" else ()
    print(f"  SGLang stand-ins     {', '.join(stood_in) or 'none'}")

    spread = "over several GPUs (accelerate)" if importlib.util.find_spec("accelerate") else "on one GPU each"
    print(
        f"  reward models        AutoModelForSequenceClassification, {'on cores' if device.kind == 'cpu' else spread}"
    )

    arguments = server_arguments(Config(), 0)
    print(f"  SGLang attention     {arguments.get('attention_backend', 'its own choice')}")


if __name__ == "__main__":
    raise SystemExit(main())

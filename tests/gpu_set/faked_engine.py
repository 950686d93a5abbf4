"""Transformer Engine's own Python on a machine without a GPU: only its compiled extension is another one.

`install` is called before anything imports Transformer Engine or Megatron-Core. The extension's functions cannot be
called, but for those that Adam's step needs, which are here in torch; its enumerations hold any name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch

PACKAGE, EXTENSION = "transformer_engine", "transformer_engine_torch"
NEEDS_DRIVER = "flash_mla"  # Megatron imports it where it is there, and it loads the driver's library at once

CUDNN = 91200  # 9.12.0
H100 = types.SimpleNamespace(major=9, minor=0, name="NVIDIA H100 80GB HBM3", multi_processor_count=132)


def install() -> None:
    """Import Transformer Engine with the faked extension, its tensors on "cuda" made on the CPU."""
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package  # not executed yet: the package itself loads the extension
    common = importlib.import_module(f"{PACKAGE}.common")
    common.load_framework_extension = _load
    spec.loader.exec_module(package)
    assert EXTENSION in sys.modules
    sys.modules[NEEDS_DRIVER] = None  # type: ignore[assignment]  # an ImportError, for which Megatron is prepared


def keep_on_cpu() -> None:
    """Let Transformer Engine's modules see `torch` as the CPU adapter lets Megatron's see it."""
    from streamrl.learner.cpu_adapter import _TorchStandIn

    stand_in = _TorchStandIn()
    stand_in.cuda.is_available = lambda: True  # type: ignore[attr-defined]
    stand_in.cuda.get_device_properties = lambda *_: H100  # type: ignore[attr-defined]
    for name, module in list(sys.modules.items()):
        if name.startswith(PACKAGE) and vars(module).get("torch") is torch:
            vars(module)["torch"] = stand_in


def _load(framework: str) -> None:
    """In the place of Transformer Engine's own, which loads a file that was compiled for the installed torch."""
    if framework == "torch":
        sys.modules[EXTENSION] = _Extension()


class _Extension(types.ModuleType):
    """The extension's names; a function that is called fails by its name."""

    def __init__(self) -> None:
        super().__init__(EXTENSION)
        self.get_cudnn_version = lambda: CUDNN
        self.multi_tensor_adam = multi_tensor_adam
        self.multi_tensor_l2norm = multi_tensor_l2norm
        self.multi_tensor_scale = multi_tensor_scale

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{EXTENSION}.{name}", side_effect=NotImplementedError(name))
        setattr(self, name, made)
        return made


def multi_tensor_adam(  # noqa: PLR0917 (the kernel's signature)
    chunk_size: int,
    overflow: torch.Tensor,
    tensors: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """AdamW (mode 1) on [gradients, parameters, first moments, second moments], as the kernel of this name does it."""
    assert mode == 1
    first, second = (1 - beta**step if bias_correction else 1.0 for beta in (beta1, beta2))
    for gradient, parameter, average, square in zip(*tensors, strict=True):
        average.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = (average / first) / ((square / second).sqrt() + eps) + weight_decay * parameter
        parameter.sub_(lr * update)


def multi_tensor_l2norm(
    chunk_size: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """The norm of all tensors together."""
    (all_of_them,) = tensors
    return torch.stack([tensor.float().norm() for tensor in all_of_them]).norm().reshape(1), None


def multi_tensor_scale(
    chunk_size: int, overflow: torch.Tensor, tensors: list[list[torch.Tensor]], scale: float
) -> None:
    """[sources, targets]: each target is its source times `scale`."""
    for source, target in zip(*tensors, strict=True):
        target.copy_(source * scale)

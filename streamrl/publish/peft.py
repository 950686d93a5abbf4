"""A PEFT folder: low-rank adapters as `adapter_config.json` and `adapter_model.safetensors`, read, written, checked.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight   [r, in]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight   [out, r]     W + lora_alpha / r * B A

torch is imported where tensors are: the worker only compares checksums, and has none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from streamrl.config_file import ConfigError
from streamrl.config_learner import LoraConfig

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
CONFIGURATION = "adapter_config.json"

Matrix = Literal["A", "B"]

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
"""Values of a configuration with which its product is lora_alpha / r * B A and nothing else is changed."""


def tensor_name(layer: int, projection: str, matrix: Matrix) -> str:
    """PEFT's name of a matrix. `projection`: `self_attn.q_proj`, ..."""
    return f"base_model.model.model.layers.{layer}.{projection}.lora_{matrix}.weight"


def write_adapter(folder: Path, tensors: Iterable[tuple[str, Tensor]], settings: LoraConfig, base: Path) -> None:
    """Write a PEFT folder, whole or not at all. `tensors`: CPU tensors under `tensor_name`; `base`: their model."""
    from safetensors.torch import save_file

    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors}, draft / WEIGHTS, metadata={"format": "pt"})
    (draft / CONFIGURATION).write_text(json.dumps(_configuration(settings, base), indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)


def read_adapter(folder: Path) -> tuple[float, dict[str, Tensor]]:
    """(lora_alpha / r, tensors by PEFT's names). Raises ConfigError for adapters that are more than B A."""
    from safetensors.torch import load_file

    configuration = read_configuration(folder)
    tensors = load_file(folder / WEIGHTS)
    for name in tensors:
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"{folder}: tensor {name} is none of a low-rank adapter")
    return configuration["lora_alpha"] / configuration["r"], tensors


def read_configuration(folder: Path) -> dict[str, Any]:
    """`adapter_config.json`. Raises ConfigError where it is missing or says what streamrl would compute otherwise."""
    path = folder / CONFIGURATION
    if not path.is_file():
        raise ConfigError(f"{folder} has no {CONFIGURATION}; a PEFT folder is needed")
    configuration: dict[str, Any] = json.loads(path.read_text())
    for key, allowed in _ALLOWED.items():
        if (given := configuration.get(key)) not in allowed:
            raise ConfigError(f"{path}: {key}={given!r} is not supported; allowed: {allowed[0]!r}")
    return configuration


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds adapters rather than whole weights."""
    return (folder / CONFIGURATION).is_file()


def merge_adapter(weights: dict[str, Tensor], folder: Path) -> None:
    """Add the adapters of `folder` to float32 weights, in place; `weights` by their Hugging Face names."""
    scale, tensors = read_adapter(folder)
    for name, a in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] != "A":
            continue
        b = tensors[f"base_model.model.{match[1]}.lora_B.weight"]
        weights[f"{match[1]}.weight"].add_(b.float() @ a.float(), alpha=scale)


def checksum(folder: Path) -> str:
    """xxh3_64 of an adapter's weights, hexadecimal. Raises OSError where they cannot be read."""
    digest = xxhash.xxh3_64()
    with (folder / WEIGHTS).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _configuration(settings: LoraConfig, base: Path) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": list(settings.modules),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }

"""A PEFT folder: low-rank adapters as `adapter_config.json` and `adapter_model.safetensors`, read, written, checked.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight   [r, in]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight   [out, r]     W + lora_alpha / r * B A

torch is imported where tensors are: the worker only compares checksums, and has none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from streamrl.config.file import ConfigError
from streamrl.config.learner import LoraConfig
from streamrl.publish.model_folder import checksum as file_checksum
from streamrl.whole_files import drafted_folder

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = "adapter_model.safetensors"
CONFIGURATION = "adapter_config.json"

Matrix = Literal["A", "B"]

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

# Values of a configuration with which its product is lora_alpha / r * B A and nothing else is changed.
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


def tensor_name(layer: int, projection: str, matrix: Matrix, prefix: str = "model.layers.") -> str:
    """PEFT's name of a matrix. `projection`: `self_attn.q_proj`, ...; `prefix`: what the layers' modules begin with."""
    return f"base_model.model.{prefix}{layer}.{projection}.lora_{matrix}.weight"


def write_adapter(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], settings: LoraConfig, base: Path, *, durable: bool = False
) -> None:
    """Write a PEFT folder, in place of what was there. `tensors`: CPU tensors under `tensor_name`; `base`: their model.

    durable: it survives a crash of the machine. Raises OSError or SafetensorError, and leaves `folder` as it was.
    """
    from safetensors.torch import save_file

    with drafted_folder(folder, durable=durable) as draft:
        save_file({name: tensor.contiguous() for name, tensor in tensors}, draft / WEIGHTS, metadata={"format": "pt"})
        (draft / CONFIGURATION).write_text(json.dumps(_configuration(settings, base), indent=2) + "\n")


def read_adapter(folder: Path) -> tuple[float, dict[str, Tensor]]:
    """(lora_alpha / r, tensors by PEFT's names), of each A its B. Raises ConfigError for what is not just B A."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    configuration = read_configuration(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder / WEIGHTS} cannot be read: {error}; a PEFT folder is needed") from error
    for name in tensors:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(f"{folder}: tensor {name} is none of a low-rank adapter")
        pair = [f"base_model.model.{match[1]}.lora_{matrix}.weight" for matrix in "AB"]
        if not all(matrix in tensors for matrix in pair):
            raise ConfigError(f"{folder} has one of {pair[0]} and {pair[1]}, not both")
    return configuration["lora_alpha"] / configuration["r"], tensors


def read_configuration(folder: Path) -> dict[str, Any]:
    """`adapter_config.json`. Raises ConfigError where it is missing or says what streamrl would compute otherwise."""
    path = folder / CONFIGURATION
    if not path.is_file():
        raise ConfigError(f"{folder} has no {CONFIGURATION}; a PEFT folder is needed")
    try:
        configuration = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(configuration, dict):
        raise ConfigError(f"{path} is no mapping of keys; a PEFT configuration is needed")
    for key, allowed in _ALLOWED.items():
        if (given := configuration.get(key)) not in allowed:
            raise ConfigError(f"{path}: {key}={given!r} is not supported; allowed: {allowed[0]!r}")
    for key, kind, words in (("r", int, "a whole number above 0"), ("lora_alpha", (int, float), "a number above 0")):
        given = configuration.get(key)
        if not isinstance(given, kind) or not given > 0:
            problem = f"{key}={given!r} is not allowed" if key in configuration else f"{key} is missing"
            raise ConfigError(f"{path}: {problem}; allowed: {words}")
    return configuration


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds adapters rather than whole weights."""
    return (folder / CONFIGURATION).is_file()


def merge_adapter(weights: dict[str, Tensor], folder: Path) -> None:
    """Add the adapters of `folder` to float32 weights, in place; `weights` by their Hugging Face names."""
    scale, tensors = read_adapter(folder)
    for name, a in tensors.items():
        match = _NAME.fullmatch(name)
        assert match is not None  # read_adapter has refused other names
        if match[2] != "A":
            continue
        b = tensors[f"base_model.model.{match[1]}.lora_B.weight"]
        if (base := f"{match[1]}.weight") not in weights:
            raise ConfigError(f"{folder}: {name} has no place in the model, which has no {base}")
        weights[base].add_(b.float() @ a.float(), alpha=scale)


def checksum(folder: Path) -> str:
    """xxh3_64 of an adapter's weights, hexadecimal. Raises OSError where they cannot be read."""
    return file_checksum(folder / WEIGHTS)


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

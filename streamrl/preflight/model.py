"""Whether the model's folder is whole, and whether the model can be cut as the layout, adapters and servers say."""

from __future__ import annotations

import json
from pathlib import Path

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.learner.fit import check_fit
from streamrl.learner.shape import ModelShape

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def check_folder(config: Config) -> None:
    """Refuse a model.path without a configuration. Raises ConfigError."""
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(
            f"model.path: {config.model.path} is no model; allowed: a Hugging Face folder (config.json, safetensors, "
            f"tokenizer); `python -m launch.tiny_model {config.model.path}` makes a tiny one"
        )


def check_weights(folder: Path) -> None:
    """Refuse a folder without weights, or with a shard that is missing. Raises ConfigError."""
    index = folder / _INDEX
    try:
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {_WEIGHTS}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"model.path: {index} has no weight_map; allowed: the index of safetensors files") from None
    for name in sorted(files):
        if not (folder / name).is_file():
            why = f", {_INDEX} names it" if index.is_file() else ""
            raise ConfigError(f"model.path: {folder / name} is missing{why}; allowed: a complete folder")


def check_model(config: Config, shape: ModelShape) -> None:
    """Refuse a layout, adapters or servers that the model cannot be cut into. Raises ConfigError."""
    check_fit(shape, config.learner.layout)
    lora = config.learner.lora
    if lora.rank and shape.moe is not None and {"linear_fc1", "linear_fc2"}.intersection(lora.targets):
        raise ConfigError(
            "learner.lora.targets: linear_fc1 and linear_fc2 are layers of experts in this model, which get no "
            "adapters; allowed: linear_qkv, linear_proj"
        )
    for pool in config.generate.each_pool:
        if shape.heads % pool.tensor_parallel:
            raise ConfigError(
                f"generate.tensor_parallel: {pool.tensor_parallel} does not divide {shape.heads} attention heads; "
                f"allowed: a divisor of {shape.heads}"
            )

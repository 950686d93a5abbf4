"""Whether model.path is a model's folder, and whether the model can be cut as the layout, adapters and servers say."""

from __future__ import annotations

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.learner.shape import ModelShape, check_fit


def check_folder(config: Config) -> None:
    """Refuse a model.path without a configuration. Raises ConfigError."""
    if not (config.model.path / "config.json").is_file():
        raise ConfigError(
            f"model.path: {config.model.path} is no model; allowed: a Hugging Face folder (config.json, safetensors, "
            f"tokenizer); `python -m launch.tiny_model {config.model.path}` makes a tiny one"
        )


def check_model(config: Config, shape: ModelShape) -> None:
    """Refuse a layout, adapters or servers that the model cannot be cut into. Raises ConfigError."""
    check_fit(shape, config.learner.layout)
    if config.learner.moe_permute_fusion and shape.moe is None:
        raise ConfigError(
            f"learner.moe_permute_fusion: true needs a mixture of experts, not {shape.architecture}; allowed: false"
        )
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

"""What a Hugging Face `config.json` says of a model, and a refusal of what would be computed otherwise."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.config_file import ConfigError

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")

VOCABULARY_MULTIPLE = 64
"""The embedding is padded to a multiple of this many rows for each tensor-parallel rank: what GPU kernels like.
The pads are on no machine part of a softmax."""


class UnsupportedModelError(ConfigError):
    """The folder holds a model that streamrl does not build; the text names what and what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What `config.json` says of a model, under one set of names.

    Example: Qwen2.5-0.5B is `ModelShape(architecture="Qwen2ForCausalLM", layers=24, hidden=896, heads=14,
    groups=2, head_dim=64, ffn=4864, vocabulary=151936, tied=True, qkv_bias=True, qk_norm=False, ...)`.
    """

    architecture: str
    layers: int
    hidden: int
    heads: int
    groups: int  # of query heads, each with one key and value head
    head_dim: int
    ffn: int
    vocabulary: int  # rows of the embedding in the folder, without padding
    tied: bool  # the output layer is the embedding
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    rope_theta: float
    max_length: int  # tokens

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        """Rows of the embedding in Megatron."""
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return math.ceil(self.vocabulary / multiple) * multiple


def read_shape(folder: Path) -> ModelShape:
    """Read `folder/config.json`. Raises UnsupportedModelError, naming the key, for what is not built here."""
    path = folder / "config.json"
    if not path.is_file():
        raise UnsupportedModelError(f"model.path: {folder} has no config.json; a Hugging Face folder is needed")
    config: dict[str, Any] = json.loads(path.read_text())
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path}: architecture {architecture} is not supported; allowed: {', '.join(ARCHITECTURES)}"
        )
    _refuse(path, config)
    heads = config["num_attention_heads"]
    return ModelShape(
        architecture=architecture,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim")
        or (128 if architecture == "Qwen3ForCausalLM" else config["hidden_size"] // heads),
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(path, config),
        max_length=config.get("max_position_embeddings", 32768),
    )


def _refuse(path: Path, config: dict[str, Any]) -> None:
    """Refuse what would silently be computed otherwise than Hugging Face does."""
    allowed = {
        "hidden_act": ("silu", config.get("hidden_act", "silu")),
        "attention_bias": (False, config.get("attention_bias", False)),
        "mlp_bias": (False, config.get("mlp_bias", False)),
        "use_sliding_window": (False, config.get("use_sliding_window", False)),
        "quantization_config": (None, config.get("quantization_config")),
    }
    for key, (value, given) in allowed.items():
        if given != value:
            raise UnsupportedModelError(f"{path}: {key}={given!r} is not supported; allowed: {value!r}")
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModelError(f"{path}: layer_types has {sorted(kinds)}; allowed: full_attention alone")


def _rope_theta(path: Path, config: dict[str, Any]) -> float:
    """Theta, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind != "default":
        raise UnsupportedModelError(f"{path}: RoPE scaling {kind!r} is not supported; allowed: 'default'")
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)

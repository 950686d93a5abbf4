"""What a Hugging Face folder says of a model: its shape, how it is cut, and which files hold its weights.

What would be computed otherwise than Hugging Face does is refused.

Pure: a plan, a conversion and the checks before a start ask it without Megatron.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from streamrl.config.file import ConfigError
from streamrl.config.learner import LayoutConfig
from streamrl.learner.rope import Rope, UnknownRopeError, read_rope

# The embedding is padded to a multiple of this many rows for each tensor-parallel rank: what GPU kernels like.
# The pads are on no machine part of a softmax.
VOCABULARY_MULTIPLE = 64

WEIGHTS_INDEX = "model.safetensors.index.json"

# Bytes of the float32 logits that are computed at once: large enough for efficient products, small beside a model.
CHUNK_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What an architecture's model code says and its `config.json` does not."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False  # its layers are mixtures of experts unless the configuration says otherwise
    head_dim: int | None = None  # where the configuration has none; None: hidden / heads
    sliding_window: int | None = None  # where the configuration has none


ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture(qkv_bias=True),
    "Qwen3ForCausalLM": Architecture(qk_norm=True, head_dim=128),
    "Qwen3MoeForCausalLM": Architecture(qk_norm=True, experts=True),
    "LlamaForCausalLM": Architecture(),
    "MistralForCausalLM": Architecture(sliding_window=4096),
}


class UnsupportedModelError(ConfigError):
    """The folder holds a model that streamrl does not build; the text names what and what is allowed."""


class WeightsMismatchError(ConfigError):
    """The folder's tensors are not those of the model; the text names the first of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeShape:
    """The mixture-of-experts layers of a model.

    Example: Qwen3-30B-A3B has `MoeShape(experts=128, top_k=8, ffn=768, normalised=True, dense_layers=())`.
    """

    experts: int
    top_k: int  # experts of one token
    ffn: int  # of one expert
    normalised: bool  # the weights of a token's experts sum to 1
    dense_layers: tuple[int, ...] = ()  # layers, counted from 0, with one MLP of the width ModelShape.ffn


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
    rope: Rope
    max_length: int  # tokens
    moe: MoeShape | None = None  # None: every layer is dense

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by: the rotary embedding's factor, twice, and 1 / sqrt(head_dim)."""
        return self.rope.attention**2 / math.sqrt(self.head_dim)

    @property
    def rope_theta(self) -> float:
        """Base of the rotary embedding's frequencies."""
        return self.rope.theta

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        """Rows of the embedding in Megatron."""
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return math.ceil(self.vocabulary / multiple) * multiple


def read_shape(folder: Path, key: str = "model.path") -> ModelShape:
    """Read `folder/config.json`. Raises UnsupportedModelError, naming the key, for what is not built here.

    key: of the configuration that names the folder.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UnsupportedModelError(f"{key}: {folder} has no config.json; a Hugging Face folder is needed")
    config = _read_config(path)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        seen = "trained, only served and evaluated" if "vision_config" in config else "supported"
        raise UnsupportedModelError(
            f"{path}: architecture {architecture} is not {seen}; allowed: {', '.join(ARCHITECTURES)}"
        )
    known = ARCHITECTURES[architecture]
    _refuse(path, config, known)
    _need(path, config, "num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    try:
        rope = read_rope(config)
    except UnknownRopeError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    heads = config["num_attention_heads"]
    return ModelShape(
        architecture=architecture,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        groups=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or known.head_dim or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocabulary=config["vocab_size"],
        tied=config.get("tie_word_embeddings", False),
        qkv_bias=known.qkv_bias,
        qk_norm=known.qk_norm,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        max_length=config.get("max_position_embeddings", 32768),
        moe=_read_moe(path, config) if known.experts else None,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{path} is no mapping of keys; a Hugging Face configuration is needed")
    return config


def _need(path: Path, config: dict[str, Any], *keys: str) -> None:
    """Refuse a configuration without one of these sizes."""
    for key in keys:
        given = config.get(key)
        if not isinstance(given, int) or given < 1:
            said = f"{key}={given!r} is not allowed" if key in config else f"{key} is missing"
            raise UnsupportedModelError(f"{path}: {said}; allowed: a whole number above 0")


def _read_moe(path: Path, config: dict[str, Any]) -> MoeShape | None:
    """The experts of a Qwen3-MoE configuration; None where every layer is dense."""
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    top_k = config.get("num_experts_per_tok") or 0
    layers = range(config["num_hidden_layers"])
    step = config.get("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or []) | {layer for layer in layers if (layer + 1) % step}
    if not experts or dense.issuperset(layers):
        return None
    if not 1 <= top_k <= experts:
        raise UnsupportedModelError(f"{path}: num_experts_per_tok={top_k} is not allowed; allowed: 1 to {experts}")
    _need(path, config, "moe_intermediate_size")
    return MoeShape(
        experts=experts,
        top_k=top_k,
        ffn=config["moe_intermediate_size"],
        normalised=config.get("norm_topk_prob", False),
        dense_layers=tuple(sorted(dense.intersection(layers))),
    )


def _refuse(path: Path, config: dict[str, Any], known: Architecture) -> None:
    """Refuse what would silently be computed otherwise than Hugging Face does."""
    allowed = {
        "hidden_act": ("silu", config.get("hidden_act", "silu")),
        "attention_bias": (False, config.get("attention_bias", False)),
        "mlp_bias": (False, config.get("mlp_bias", False)),
        "use_sliding_window": (False, config.get("use_sliding_window", False)),
        "quantization_config": (None, config.get("quantization_config")),
        "vision_config": (None, config.get("vision_config")),
        "text_config": (None, config.get("text_config")),
    }
    for key, (value, given) in allowed.items():
        if given != value:
            raise UnsupportedModelError(f"{path}: {key}={given!r} is not supported; allowed: {value!r}")
    kinds = set(config.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModelError(f"{path}: layer_types has {sorted(kinds)}; allowed: full_attention alone")
    if known.sliding_window is not None:
        _refuse_window(path, config, known.sliding_window)


def _refuse_window(path: Path, config: dict[str, Any], default: int) -> None:
    """A window as long as the context hides nothing; a shorter one is not built."""
    window = config.get("sliding_window", default)
    longest = config.get("max_position_embeddings", 32768)
    if window is not None and window < longest:
        raise UnsupportedModelError(
            f"{path}: sliding_window={window} is not supported; allowed: null, or at least "
            f"max_position_embeddings={longest}"
        )


def weight_files(folder: Path, key: str = "model.path") -> list[Path]:
    """The safetensors files of a Hugging Face folder: those that its index names, all where it has no index.

    Raises WeightsMismatchError, naming the key, where one is missing or there is none.
    """
    index, paths = folder / WEIGHTS_INDEX, sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise WeightsMismatchError(
                f"{key}: {index} has no weight_map; allowed: the index of safetensors files"
            ) from None
        paths = [folder / name for name in sorted(names)]
    if not paths:
        raise WeightsMismatchError(f"{key}: {folder} has no safetensors file; allowed: a complete folder")
    for path in paths:
        if not path.is_file():
            raise WeightsMismatchError(
                f"{key}: {path} is missing, {WEIGHTS_INDEX} names it; allowed: a complete folder"
            )
    return paths


def open_weights(path: Path, key: str = "model.path") -> Any:
    """A safetensors file, as a context. Raises WeightsMismatchError for one that is not whole."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise WeightsMismatchError(f"{key}: {path} is no whole safetensors file: {error}") from error


def check_fit(shape: ModelShape, layout: LayoutConfig) -> None:
    """Refuse a layout that this model cannot be cut into.

    Raises ConfigError: which key, what is given, what is allowed.

    Example: a model of 14 heads is not cut with `learner.layout.tensor: 4`.
    """
    whole = {"attention heads": shape.heads, "key and value heads": shape.groups, "MLP columns": shape.ffn}
    for what, count in whole.items():
        _must_divide("tensor", layout.tensor, count, what)
    stage_layers(shape.layers, layout)
    if shape.moe is None:
        if layout.expert > 1 or layout.expert_tensor > 1:
            raise ConfigError(
                f"learner.layout.expert: {max(layout.expert, layout.expert_tensor)} ranks cannot share experts, "
                f"{shape.architecture} has none; allowed: expert=1, expert_tensor=1"
            )
        return
    _must_divide("expert", layout.expert, shape.moe.experts, "experts")
    _must_divide("expert_tensor", layout.expert_tensor, shape.moe.ffn, "columns of an expert")
    if layout.tensor > 1 and not layout.sequence:
        raise ConfigError("learner.layout.sequence: false with experts and tensor above 1; allowed: true")


def stage_layers(layers: int, layout: LayoutConfig) -> tuple[int, ...]:
    """How many of a model's layers each pipeline stage has.

    Raises ConfigError where the stages between the first and the last do not share theirs evenly.

    >>> stage_layers(94, LayoutConfig(pipeline=8, first_stage=11, last_stage=11))
    (11, 12, 12, 12, 12, 12, 12, 11)
    """
    given = {0: layout.first_stage, layout.pipeline - 1: layout.last_stage}
    own = {stage: count for stage, count in given.items() if count is not None}
    left, stages = layers - sum(own.values()), layout.pipeline - len(own)
    share = left // stages if stages else 0
    if share * stages != left or (stages and (not share or share % layout.virtual)):
        ends = "".join(
            f", {name} {count}" for name, count in zip(("first", "last"), given.values(), strict=False) if count
        )
        raise ConfigError(
            f"learner.layout.pipeline: {layout.pipeline} stages of {layout.virtual} chunks{ends} do not share {layers} "
            "layers evenly; allowed: pipeline x virtual that divides them, or first_stage and last_stage beside it"
        )
    return tuple(own.get(stage, share) for stage in range(layout.pipeline))


def _must_divide(key: str, size: int, count: int, what: str) -> None:
    if count % size:
        raise ConfigError(f"learner.layout.{key}: {size} does not divide {count} {what}; allowed: a divisor of {count}")

"""What a Hugging Face folder says of a model: its shape, and which files hold its weights.

What would be computed otherwise than Hugging Face does is refused.

Pure: a plan, a conversion and the checks before a start ask it without Megatron.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from streamrl.choices import FAMILIES
from streamrl.config.file import ConfigError
from streamrl.config.learner import LORA_PROJECTIONS, LoraTarget
from streamrl.learner.delta_shape import DeltaShape
from streamrl.learner.families._missing import MISSING
from streamrl.learner.mamba_shape import ATTENTION, EXPERTS, MAMBA, MLP, MambaShape
from streamrl.learner.rope import Rope
from streamrl.learner.vision.shape import VisionShape

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.learner.families.base import ModelFamily

# The embedding is padded to a multiple of this many rows for each tensor-parallel rank: what GPU kernels like.
# No softmax covers the pads.
VOCABULARY_MULTIPLE = 64

# Ends of the names, Megatron's and Hugging Face's, of weights that stay float32 whatever the model's dtype is.
FLOAT32 = ("mlp.router.expert_bias", "gate.e_score_correction_bias")

WEIGHTS_INDEX = "model.safetensors.index.json"

# Bytes of the float32 logits that are computed at once: large enough for efficient products, small beside a model.
CHUNK_BYTES = 256 << 20

# Bytes of one safetensors file that is written.
SHARD_BYTES = 4 << 30

# The end of a line that refuses an architecture: whom it may be built by.
BY_TRANSFORMERS = ", or any of transformers' with model.implementation=transformers"


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
    dense_layers: tuple[int, ...] = ()  # layers, counted from 0, without experts
    sigmoid: bool = False  # scores are sigmoids, and a bias for each expert counts in the choice alone; else a softmax
    scaling: float = 1.0  # factor on the weights of a token's experts
    shared_ffn: int = 0  # of the MLP that every token meets beside its experts
    groups: int = 1  # equal ones, in order; a token's experts are of `group_top_k` of them
    group_top_k: int = 1  # by the sum of each group's two largest scores
    clamp: float | None = None  # of gate and up before the activation
    shared_gate: bool = False  # what the shared MLP adds is times a sigmoid of each token


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): all heads' keys and values from one vector.

    Example: DeepSeek-V3 has `LatentShape(query_rank=1536, rank=512, plain=128, turned=64, value=128, scale=0.1352)`.
    """

    query_rank: int | None  # of the queries' own vector; None: they come from the hidden state
    rank: int  # of the vector that keys and values are made of
    plain: int  # dimensions of a query or key that no rotary embedding turns
    turned: int  # those that one turns; the keys of all heads share theirs
    value: int  # width of a value head
    scale: float  # of scores


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """What attention has beside causal masks.

    Example: gpt-oss-20b has `AttentionShape(window=128, windowed=(0, 2, ..., 22), sinks=True, bias=True)`.
    """

    window: int | None = None  # tokens that a token of a layer with a window sees, itself included
    windowed: tuple[int, ...] = ()  # layers, from 0, with the window
    sinks: bool = False  # each head has a score that takes part in the softmax and has no value
    bias: bool = False  # on the output projection, the router and the experts
    window_rope: Rope | None = None  # rotary embedding of layers with the window; None: that of all
    scale: float | None = None  # of scores; None: by the width of heads
    gate: bool = False  # outputs are times a sigmoid that is as wide

    @property
    def is_plain(self) -> bool:
        """Only causal: whatever kernel is there computes it."""
        return not self.windowed and not self.sinks


PLAIN = AttentionShape()


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """Sizes of a model that no family's tables describe. Example: `Counts(parameters=494_032_768, met=357_826_560)`."""

    parameters: int
    met: int  # weights of matrices that one token meets, without embedding and output layer


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What `config.json` says of a model, under one set of names.

    Example: Qwen2.5-0.5B is `ModelShape(architecture="Qwen2ForCausalLM", family=Qwen2, layers=24, hidden=896,
    heads=14, groups=2, head_dim=64, ffn=4864, vocabulary=151936, tied=True, qkv_bias=True, qk_norm=False, ...)`.
    """

    architecture: str
    family: type[ModelFamily]
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
    latent: LatentShape | None = None  # None: each head has projections of its own
    attention: AttentionShape = PLAIN
    vision: VisionShape | None = None  # None: it reads no images
    delta: DeltaShape | None = None  # None: no layer is a delta net
    mamba: MambaShape | None = None  # None: every layer has both an MLP or experts and what mixes tokens
    gated: bool = True  # MLPs and experts have a gate; else two matrices
    embedding_scale: float = 1.0  # factor on embeddings, rounded to their dtype
    unbuilt_layers: int = 0  # behind the others in the folder, for multi-token prediction: neither built nor exported
    computes: dict[str, Any] | None = None  # `config.json`, of a model that transformers builds; None: Megatron does

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by: the rotary embedding's factor, twice, and 1 / sqrt(head_dim)."""
        if self.latent is not None:
            return self.latent.scale
        if self.attention.scale is not None:
            return self.attention.scale
        return (self.rope.attention / self.rotary_gain) ** 2 / math.sqrt(self.head_dim)

    @property
    def rotary_gain(self) -> float:
        """Factor on cosines and sines, where it is not on all dimensions of a head and so not on scores."""
        return self.rope.attention if self.rope.part < 1 else 1.0

    @property
    def turned(self) -> int:
        """Dimensions of a head that the rotary embedding is about."""
        return self.head_dim if self.latent is None else self.latent.turned

    def frequencies(self) -> Tensor:
        """Rotary frequencies of all kinds of layers, side by side: float32 [kinds * turned / 2], on the CPU."""
        import torch

        ropes = [self.rope] if self.attention.window_rope is None else [self.rope, self.attention.window_rope]
        return torch.cat([rope.frequencies(self.turned) for rope in ropes])

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.latent is None else self.latent.value

    @property
    def rope_theta(self) -> float:
        """Base of the rotary embedding's frequencies."""
        return self.rope.theta

    def attention_weights(self, tensor: int = 1) -> int:
        """Weights of the matrices of one layer's attention, on one of so many tensor-parallel ranks."""
        latent = self.latent
        if latent is None:
            heads = (3 if self.attention.gate else 2) * self.heads + 2 * self.groups
            return heads * self.head_dim // tensor * self.hidden
        whole = self.hidden * (latent.rank + latent.turned + (latent.query_rank or 0))
        query = (latent.query_rank or self.hidden) * self.head_dim
        heads = query + latent.rank * (latent.plain + latent.value) + latent.value * self.hidden
        return whole + self.heads // tensor * heads

    def is_delta(self, layer: int) -> bool:
        """Whether a layer, from 0, is a delta net and has no attention."""
        return self.delta is not None and layer in self.delta.layers

    def is_mamba(self, layer: int) -> bool:
        """Whether a layer, from 0, is a Mamba-2 layer and has no attention."""
        return self.mamba is not None and self.mamba.kinds[layer] == MAMBA

    def has_attention(self, layer: int) -> bool:
        """Whether a layer, from 0, has keys and values."""
        return self.mamba.kinds[layer] == ATTENTION if self.mamba is not None else not self.is_delta(layer)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer, from 0, has an MLP or experts."""
        return self.mamba is None or self.mamba.kinds[layer] in (MLP, EXPERTS)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, from 0, is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP or an expert: gate, up and down projection."""
        return 3 if self.gated else 2

    def mixer_weights(self, layer: int, tensor: int = 1) -> int:
        """As `attention_weights`, of what mixes tokens in a layer: attention, a delta net, Mamba-2, or nothing."""
        if self.delta is not None and self.is_delta(layer):
            return (self.delta.projected + self.delta.values * self.delta.value) // tensor * self.hidden
        if self.mamba is not None and self.is_mamba(layer):
            return (self.mamba.projected + self.mamba.inner) // tensor * self.hidden
        return self.attention_weights(tensor) if self.has_attention(layer) else 0

    def padded_vocabulary(self, tensor_parallel: int) -> int:
        """Rows of the embedding in the learner."""
        if not self.family.by_megatron:
            return self.vocabulary
        multiple = VOCABULARY_MULTIPLE * tensor_parallel
        return math.ceil(self.vocabulary / multiple) * multiple


def adapter_sizes(shape: ModelShape) -> dict[LoraTarget, tuple[int, int, int]]:
    """For each target of adapters in a layer: its projections, their inputs, all their outputs (learner/lora.py)."""
    heads, groups = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    values = shape.heads * shape.value_dim
    return {
        "linear_qkv": (3, shape.hidden, heads + 2 * groups),
        "linear_proj": (1, values, shape.hidden),
        "linear_fc1": (2, shape.hidden, 2 * shape.ffn),
        "linear_fc2": (1, shape.ffn, shape.hidden),
    }


def check_adapters(shape: ModelShape, targets: Iterable[LoraTarget]) -> None:
    """Refuse adapters on layers of which the family's folders know no single projections. Raises ConfigError."""
    refused = sorted(shape.family.without_adapters.intersection(targets))
    if refused and shape.family.without_adapters.issuperset(LORA_PROJECTIONS):
        raise ConfigError(f"learner.lora.rank: adapters are not supported for {shape.architecture}; allowed: 0")
    if refused:
        allowed = ", ".join(target for target in LORA_PROJECTIONS if target not in shape.family.without_adapters)
        raise ConfigError(
            f"learner.lora.targets: {refused[0]} is not supported for {shape.architecture}, which has no projections "
            f"of its own for it; allowed: {allowed}"
        )


def read_shape(folder: Path, key: str = "model.path", family: str | None = None) -> ModelShape:
    """Read `folder/config.json`. Raises UnsupportedModelError, naming the key, for what is not built here.

    key: of the configuration that names the folder. family: `model.family`.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UnsupportedModelError(f"{key}: {folder} has no config.json; a Hugging Face folder is needed")
    config = _read_config(path)
    chosen = _family_of(path, config) if family is None else FAMILIES.load(family)
    shape: ModelShape = chosen.read(path, {**chosen.defaults, **config})
    return shape


def _family_of(path: Path, config: dict[str, Any]) -> type[ModelFamily]:
    """The built-in family of an architecture."""
    architecture = (config.get("architectures") or ["none"])[0]
    families: list[type[ModelFamily]] = [FAMILIES.load(name) for name in FAMILIES.names]
    for family in families:
        if architecture in family.architectures:
            return family
    sees = "vision_config" in config
    seen, others = ("trained, only served and evaluated", "") if sees else ("supported", BY_TRANSFORMERS)
    missing = f"; missing: {MISSING[architecture]}" if architecture in MISSING else ""
    known = ", ".join(name for family in families for name in family.architectures)
    raise UnsupportedModelError(
        f"{path}: architecture {architecture} is not {seen}{missing}; allowed: {known}, or a family of your own by "
        f"model.family{others}"
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{path} is no mapping of keys; a Hugging Face configuration is needed")
    text = config.get("text_config")
    for part, each in (("", config), ("text_config.", text if isinstance(text, dict) else {})):
        for key in ("rope_parameters", "rope_scaling"):
            if not isinstance(each.get(key), dict | None):
                found = f"{part}{key}: {each[key]!r}"
                raise UnsupportedModelError(f"{path}: {found} is not allowed; allowed: a mapping, null")
    return config


def need(path: Path, config: dict[str, Any], *keys: str) -> None:
    """Refuse a configuration without one of these sizes."""
    for key in keys:
        given = config.get(key)
        if not isinstance(given, int) or given < 1:
            problem = f"{key}={given!r} is not allowed" if key in config else f"{key} is missing"
            raise UnsupportedModelError(f"{path}: {problem}; allowed: a whole number above 0")


def weight_files(folder: Path, key: str = "model.path") -> list[Path]:
    """The safetensors files of a Hugging Face folder: those that its index names, all where it has no index.

    Raises WeightsMismatchError, naming the key, where one is missing or there is none.
    """
    index, paths = folder / WEIGHTS_INDEX, sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            paths = [folder / name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise WeightsMismatchError(
                f"{key}: {index} has no weight_map; allowed: the index of safetensors files"
            ) from None
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

"""What a model family is: which architectures it builds, what it reads of a `config.json`, and the table of names.

A subclass changes what its models have otherwise. No torch here: a plan, a conversion and the checks before a start ask
a family as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.choices import Choice
from streamrl.learner.rope import UnknownRopeError, read_rope
from streamrl.learner.shape import ModelShape, MoeShape, UnsupportedModelError, need

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch import nn

    from streamrl.config import Config
    from streamrl.config.learner import LayoutConfig, LoraTarget
    from streamrl.learner.mapping import Cut
    from streamrl.learner.shape import Counts
    from streamrl.learner.vision.shape import VisionShape

# How a parameter is cut over ranks, by a name of `learner/mapping.py:CUTS` or of `cuts`, and the Hugging Face tensors
# that it is made of.
Entry = tuple[str, tuple[str, ...]]

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"

OUTSIDE_LAYERS: Mapping[str, Entry] = {
    EMBEDDING: ("vocabulary", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": ("replicated", ("model.norm.weight",)),
    OUTPUT: ("vocabulary", ("lm_head.weight",)),
}
IN_A_LAYER: Mapping[str, Entry] = {
    "input_layernorm.weight": ("replicated", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.q_layernorm.weight": ("replicated", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("replicated", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("columns", ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": ("replicated", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gate_and_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", ("mlp.down_proj.weight",)),
    "mlp.router.weight": ("replicated", ("mlp.gate.weight",)),
}
IN_AN_EXPERT: Mapping[str, Entry] = {
    "linear_fc1": ("gate_and_up", ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
    "linear_fc2": ("columns", ("mlp.experts.{}.down_proj.weight",)),
}


_SIZES = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")


def need_values(path: Path, config: dict[str, Any], built: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError where one of these keys has another value than the one that is built."""
    for key, value in built.items():
        if config.get(key, value) != value:
            raise UnsupportedModelError(f"{path}: {key}={config[key]!r} is not supported; allowed: {value!r}")


class ModelFamily(Choice):
    """A decoder with RMS norms, rotary embeddings, grouped queries and gated MLPs, dense or of experts."""

    # In `config.json`: the family is found by them, unless `model.family` names it.
    architectures: ClassVar[tuple[str, ...]]

    # What `config.json` means without these keys, where other families' means something else.
    defaults: ClassVar[Mapping[str, Any]] = {}

    qkv_bias: ClassVar[bool] = False
    # `attention_bias` of `config.json` says whether they have one; this where it says nothing. None: `qkv_bias` does.
    attention_bias: ClassVar[bool | None] = None
    qk_norm: ClassVar[bool] = False

    norms_in_a_layer: ClassVar[int] = 2  # over the hidden size

    # Its layers are mixtures of experts unless `config.json` says otherwise.
    experts: ClassVar[bool] = False

    # Where `config.json` has none; None: hidden / heads.
    head_dim: ClassVar[int | None] = None

    # Where `config.json` has none.
    sliding_window: ClassVar[int | None] = None

    # `partial_rotary_factor` where `config.json` has none; None: whole heads are turned, anything else is refused.
    rotary_part: ClassVar[float | None] = None
    rotary_interleaved: ClassVar[bool] = False

    # Its models are of Megatron's layers, which a layout cuts; else of transformers' (`learner/whole/`).
    by_megatron: ClassVar[bool] = True

    # Its layers may be Transformer Engine's.
    engine: ClassVar[bool] = True

    # SGLang takes adapters for it, and quantises its weights in blocks.
    served_adapters: ClassVar[bool] = True
    served_blocks: ClassVar[bool] = True

    # Targets of adapters that folders of this family have no projections for.
    without_adapters: ClassVar[frozenset[LoraTarget]] = frozenset()

    # Beginnings of the names of tensors that folders have and models do not: neither built nor exported.
    unbuilt: ClassVar[tuple[str, ...]] = ()

    outside_layers: ClassVar[Mapping[str, Entry]] = OUTSIDE_LAYERS
    # Parameters of one Megatron layer; their tensors follow `layers_prefix` and `N.` in a folder.
    in_a_layer: ClassVar[Mapping[str, Entry]] = IN_A_LAYER

    layers_prefix: ClassVar[str] = "model.layers."
    adapters_prefix: ClassVar[str] = "model.layers."  # the same of transformers' modules, which PEFT folders name
    vision_prefix: ClassVar[str] = ""  # of the tensors of a vision tower

    # Linear layers of one expert; `{}` is its number.
    in_an_expert: ClassVar[Mapping[str, Entry]] = IN_AN_EXPERT

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        """The shape that the `config.json` at `path` describes.

        Raises UnsupportedModelError for what would silently be computed otherwise than Hugging Face does.
        """
        cls.refuse(path, config)
        given = [key for key in ("num_key_value_heads", "head_dim") if config.get(key) is not None]
        need(path, config, *_SIZES, *given)
        try:
            rope = read_rope(config, cls.rotary_part, interleaved=cls.rotary_interleaved)
        except UnknownRopeError as error:
            raise UnsupportedModelError(f"{path}: {error}") from error
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        if heads % groups:
            raise UnsupportedModelError(
                f"{path}: num_key_value_heads={groups} is not allowed; allowed: a divisor of {heads}"
            )
        return ModelShape(
            architecture=(config.get("architectures") or ["none"])[0],
            family=cls,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            groups=groups,
            head_dim=config.get("head_dim") or cls.head_dim or config["hidden_size"] // heads,
            ffn=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            qkv_bias=cls.qkv_bias if cls.attention_bias is None else config.get("attention_bias", cls.attention_bias),
            qk_norm=cls.qk_norm,
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=rope,
            max_length=config.get("max_position_embeddings", 32768),
            moe=cls.read_experts(path, config) if cls.experts else None,
        )

    @classmethod
    def read_experts(cls, path: Path, config: dict[str, Any]) -> MoeShape | None:
        """The experts; None where every layer is dense."""
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        top_k = config.get("num_experts_per_tok") or 0
        layers = range(config["num_hidden_layers"])
        step = config.get("decoder_sparse_step", 1)
        dense = set(config.get("mlp_only_layers") or []) | {layer for layer in layers if (layer + 1) % step}
        if not experts or dense.issuperset(layers):
            return None
        normalised = config.get("norm_topk_prob", False)
        least = 2 if normalised else 1  # the weight of a single expert would be 1, whatever the router says
        if not least <= top_k <= experts:
            raise UnsupportedModelError(
                f"{path}: num_experts_per_tok={top_k} is not allowed; allowed: {least} to {experts}"
            )
        need(path, config, "moe_intermediate_size")
        return MoeShape(
            experts=experts,
            top_k=top_k,
            ffn=config["moe_intermediate_size"],
            normalised=normalised,
            dense_layers=tuple(sorted(dense.intersection(layers))),
        )

    @classmethod
    def refuse(cls, path: Path, config: dict[str, Any]) -> None:
        """Raise UnsupportedModelError for what is not built."""
        allowed = {
            "hidden_act": ("silu", config.get("hidden_act", "silu")),
            "attention_bias": (False, cls.attention_bias is None and config.get("attention_bias", False)),
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
        if cls.sliding_window is not None:
            cls._refuse_window(path, config, cls.sliding_window)

    @classmethod
    def _refuse_window(cls, path: Path, config: dict[str, Any], default: int | None) -> None:
        """A window as long as the context hides nothing; a shorter one is not built."""
        window = config.get("sliding_window", default)
        longest = config.get("max_position_embeddings", 32768)
        if window is not None and window < longest:
            raise UnsupportedModelError(
                f"{path}: sliding_window={window} is not supported; allowed: null, or at least "
                f"max_position_embeddings={longest}"
            )

    @classmethod
    def check_layout(cls, shape: ModelShape, layout: LayoutConfig) -> None:
        """Raise ConfigError for a layout that this model cannot be cut into, beside what its sizes say."""

    @classmethod
    def check_run(cls, config: Config) -> None:
        """Raise ConfigError, with a line for each, for settings of a run that its models cannot have."""

    @classmethod
    def counts(cls, shape: ModelShape) -> Counts | None:
        """Parameters, where the tables of names do not tell them."""
        return None

    @classmethod
    def has(cls, shape: ModelShape, name: str, mixture: bool) -> bool:
        """Whether a layer of this model, a mixture of experts or not, has the parameter `name` of `in_a_layer`."""
        if name.startswith("mlp."):
            if name.startswith("mlp.shared_experts."):
                return mixture and shape.moe is not None and shape.moe.shared_ffn > 0
            return mixture == name.startswith("mlp.router.")
        if name.endswith(".bias"):
            return shape.qkv_bias
        return shape.qk_norm or not name.endswith(("q_layernorm.weight", "k_layernorm.weight"))

    @classmethod
    def tower_tensors(cls, vision: VisionShape) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of each tensor of the vision tower."""
        return {}

    @classmethod
    def tower(cls, vision: VisionShape) -> nn.Module:
        """The vision tower, which takes pixels and `grid_thw` as transformers' do. It may import torch."""
        raise NotImplementedError(f"{cls.__name__} has no vision tower")

    @classmethod
    def has_in_layer(cls, shape: ModelShape, layer: int, name: str, mixture: bool) -> bool:
        """Whether layer number `layer`, from 0, has the parameter `name`; `has`, unless layers of one kind differ."""
        return cls.has(shape, name, mixture)

    @classmethod
    def edit(cls, layer: ModuleSpec, config: TransformerConfig) -> None:
        """Change what one layer is made of: Megatron's specification, a copy for each layer. It may import torch."""

    @classmethod
    def edit_in_layer(cls, layer: ModuleSpec, config: TransformerConfig, shape: ModelShape, number: int) -> None:
        """Change what layer `number` of the model, from 0, is made of; `edit`, unless layers of one kind differ."""
        cls.edit(layer, config)

    @classmethod
    def cuts(cls) -> Mapping[str, Cut]:
        """Ways of its own to cut a parameter, by their names in the tables. It may import torch."""
        return {}

    @classmethod
    def arguments(cls, shape: ModelShape) -> Mapping[str, Any]:
        """Megatron-LM's arguments that differ from those of other families."""
        return {}

    @classmethod
    def megatron(cls, shape: ModelShape) -> Mapping[str, Any]:
        """Fields of Megatron's TransformerConfig that differ from those of other families. It may import torch."""
        return {}

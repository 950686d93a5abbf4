"""The family `gemma3_text`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families._windows import windowed_layers
from streamrl.learner.families.base import IN_A_LAYER, Entry, ModelFamily, need_values
from streamrl.learner.rope import Rope, UnknownRopeError, read_rope
from streamrl.learner.shape import AttentionShape, ModelShape, UnsupportedModelError, need

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

# Where `config.json` has none.
_PATTERN = 6  # every so many-th layer sees all
_WINDOW = 4096
_SCALAR = 256
_THETA, _LOCAL_THETA = 1e6, 1e4

# Of `config.json`: what is built, which is also what a configuration without the key means.
_BUILT: Mapping[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


class Gemma3Text(ModelFamily):
    """Gemma 3's text models: windows on five of six layers, with a rotary embedding of their own; norms before and
    behind each part, whose weights count from 1; embeddings times the root of their width.

    Vision-language folders (`Gemma3ForConditionalGeneration`) are not read.
    """

    architectures = ("Gemma3ForCausalLM",)
    engine = False
    qk_norm = True
    head_dim = 256
    norms_in_a_layer = 4
    served_blocks = False
    in_a_layer: ClassVar[Mapping[str, Entry]] = {
        **IN_A_LAYER,
        "self_attn_bda.norm.weight": ("replicated", ("post_attention_layernorm.weight",)),
        "pre_mlp_layernorm.weight": ("replicated", ("pre_feedforward_layernorm.weight",)),
        "mlp_bda.norm.weight": ("replicated", ("post_feedforward_layernorm.weight",)),
    }

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        pattern = config.get("sliding_window_pattern", _PATTERN)
        windowed = windowed_layers(path, config, lambda layer: (layer + 1) % pattern > 0)
        window = config.get("sliding_window", _WINDOW)
        if windowed:
            need(path, {"sliding_window": window}, "sliding_window")
        everywhere, local = _ropes(path, config)
        given = {key: value for key, value in config.items() if key not in ("layer_types", "rope_scaling")}
        given["tie_word_embeddings"] = config.get("tie_word_embeddings", True)
        shape = super().read(path, given | {"rope_parameters": {"rope_theta": everywhere.theta}})
        attention = AttentionShape(
            window=window if windowed else None,
            windowed=windowed,
            window_rope=local,
            scale=config.get("query_pre_attn_scalar", _SCALAR) ** -0.5,
        )
        return replace(shape, rope=everywhere, attention=attention, embedding_scale=shape.hidden**0.5)

    @classmethod
    def refuse(cls, path: Path, config: dict[str, Any]) -> None:
        super().refuse(path, config)
        if config.get("use_bidirectional_attention"):
            raise UnsupportedModelError(f"{path}: use_bidirectional_attention=True is not supported; allowed: False")
        need_values(path, config, _BUILT)

    @classmethod
    def edit(cls, layer: ModuleSpec, config: TransformerConfig) -> None:
        from streamrl.learner.rope_by_layer import RopeByLayer
        from streamrl.learner.sandwich import add_norms
        from streamrl.learner.sink_attention import SinkAttention

        layer.submodules.self_attention.module = RopeByLayer
        layer.submodules.self_attention.submodules.core_attention = SinkAttention
        add_norms(layer, config)

    @classmethod
    def arguments(cls, shape: ModelShape) -> Mapping[str, Any]:
        return {**_windows(shape), "apply_layernorm_1p": True, "swiglu": False}

    @classmethod
    def megatron(cls, shape: ModelShape) -> Mapping[str, Any]:
        from functools import partial

        from torch.nn.functional import gelu

        return {
            **_windows(shape),
            "layernorm_zero_centered_gamma": True,
            "activation_func": partial(gelu, approximate="tanh"),
        }


def _windows(shape: ModelShape) -> Mapping[str, Any]:
    attention = shape.attention
    if attention.window is None:
        return {}
    return {
        "window_size": (attention.window - 1, 0),
        "window_attn_skip_freq": [int(layer in attention.windowed) for layer in range(shape.layers)],
    }


def _ropes(path: Path, config: dict[str, Any]) -> tuple[Rope, Rope]:
    """The ropes of layers that see all, and with a window: by kind in `rope_parameters` (transformers 5), or before."""
    nested = config.get("rope_parameters") or {}
    everywhere = nested.get("full_attention") or config.get("rope_scaling") or {}
    local = nested.get("sliding_attention") or {}
    theta = everywhere.get("rope_theta") or config.get("rope_theta") or _THETA
    local_theta = local.get("rope_theta") or config.get("rope_local_base_freq") or _LOCAL_THETA
    length = {"max_position_embeddings": config.get("max_position_embeddings")}
    try:
        ropes = [
            read_rope({**length, "rope_parameters": {**given, "rope_theta": base}})
            for given, base in ((everywhere, theta), (local, local_theta))
        ]
    except UnknownRopeError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    for rope in ropes:
        # SGLang turns the heads of layers with a window without a scaling, and of the others by `linear` at most.
        allowed = ("linear",) if rope is ropes[0] else ()
        if rope.scaling is not None and rope.scaling.kind not in allowed:
            problem = f"RoPE scaling {rope.scaling.kind!r} is not supported for Gemma 3"
            raise UnsupportedModelError(f"{path}: {problem}; allowed: default, and linear for full_attention")
    return ropes[0], ropes[1]

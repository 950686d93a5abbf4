"""The family `gpt_oss`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families._windows import windowed_layers
from streamrl.learner.families.base import IN_A_LAYER, Entry, ModelFamily
from streamrl.learner.shape import AttentionShape, ModelShape, MoeShape, UnsupportedModelError, need

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from streamrl.learner.mapping import Cut

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
_GAIN, _LIMIT = 1.702, 7.0  # of the activation, where `config.json` has none


class GptOss(ModelFamily):
    """gpt-oss: a sink for each head, a window on every other layer, experts with biases and a clamped activation.

    A folder has each matrix of a layer's experts in one tensor, turned, with gate and up in alternate columns. Folders
    of MXFP4 weights are refused: dequantise them to bfloat16 first.
    """

    architectures = ("GptOssForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5, "rope_theta": 150000.0, "rope_scaling": _YARN}
    engine = False
    served_adapters = False
    served_blocks = False
    experts = True
    attention_bias = True
    head_dim = 64
    in_a_layer: ClassVar[Mapping[str, Entry]] = {
        **{
            name: entry
            for name, entry in IN_A_LAYER.items()
            if not name.startswith("mlp.") and not name.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        },
        "self_attention.linear_proj.bias": ("replicated", ("self_attn.o_proj.bias",)),
        "self_attention.core_attention.softmax_offset": ("rows", ("self_attn.sinks",)),
        "mlp.router.weight": ("replicated", ("mlp.router.weight",)),
        "mlp.router.bias": ("replicated", ("mlp.router.bias",)),
    }
    in_an_expert: ClassVar[Mapping[str, Entry]] = {
        "linear_fc1": ("pairs", ("mlp.experts.gate_up_proj",)),
        "linear_fc1.bias": ("pairs_bias", ("mlp.experts.gate_up_proj_bias",)),
        "linear_fc2": ("turned", ("mlp.experts.down_proj",)),
        "linear_fc2.bias": ("replicated", ("mlp.experts.down_proj_bias",)),
    }

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        need(path, config, "num_hidden_layers", "sliding_window")
        windowed = windowed_layers(path, config, lambda layer: layer % 2 == 0)
        shape = super().read(path, {key: value for key, value in config.items() if key != "layer_types"})
        attention = AttentionShape(window=config["sliding_window"], windowed=windowed, sinks=True, bias=True)
        return replace(shape, attention=attention)

    @classmethod
    def read_experts(cls, path: Path, config: dict[str, Any]) -> MoeShape | None:
        need(path, config, "num_local_experts", "num_experts_per_tok", "intermediate_size")
        experts, top_k = config["num_local_experts"], config["num_experts_per_tok"]
        if not 1 < top_k <= experts:
            raise UnsupportedModelError(f"{path}: num_experts_per_tok={top_k} is not allowed; allowed: 2 to {experts}")
        clamp = float(config.get("swiglu_limit") or _LIMIT)
        return MoeShape(experts=experts, top_k=top_k, ffn=config["intermediate_size"], normalised=True, clamp=clamp)

    @classmethod
    def refuse(cls, path: Path, config: dict[str, Any]) -> None:
        if (config.get("quantization_config") or {}).get("quant_method") == "mxfp4":
            raise UnsupportedModelError(
                f"{path}: quantization_config says MXFP4 weights, which are not trained; allowed: a folder that "
                "transformers has saved after loading it with Mxfp4Config(dequantize=True), without this key"
            )
        if (gain := config.get("swiglu_alpha", _GAIN)) != _GAIN:
            raise UnsupportedModelError(f"{path}: swiglu_alpha={gain} is not supported; allowed: {_GAIN}")
        if config.get("attention_bias", True) is not True:
            raise UnsupportedModelError(f"{path}: attention_bias=false is not supported; allowed: true")
        super().refuse(path, config)

    @classmethod
    def has(cls, shape: ModelShape, name: str, mixture: bool) -> bool:
        return True

    @classmethod
    def edit(cls, layer: ModuleSpec, config: TransformerConfig) -> None:
        from streamrl.learner.biased_experts import use_biased_experts
        from streamrl.learner.sink_attention import SinkAttention

        layer.submodules.self_attention.submodules.core_attention = SinkAttention
        use_biased_experts(layer)

    @classmethod
    def cuts(cls) -> Mapping[str, Cut]:
        import torch

        from streamrl.learner.mapping import Cut

        def join(_: ModelShape, pieces: Any) -> Any:
            """[hidden, gate and up in turn] -> [all of the gate, then all of up, hidden]; a bias without `hidden`."""
            (piece,) = pieces
            return torch.cat([piece[..., 0::2], piece[..., 1::2]], -1).t()

        def split(_: ModelShape, part: Any) -> list[Any]:
            gate, up = part.t().chunk(2, -1)
            return [torch.stack([gate, up], -1).flatten(-2)]

        return {
            "pairs": Cut(1, join, split, turned=True),
            "pairs_bias": Cut(0, join, split),
            "turned": Cut(0, lambda _, pieces: pieces[0].t(), lambda _, part: [part.t()], turned=True),
        }

    @classmethod
    def arguments(cls, shape: ModelShape) -> Mapping[str, Any]:
        given = {**cls.megatron(shape), "quick_geglu": True, "swiglu": False}
        return {key: value for key, value in given.items() if key != "activation_func"}

    @classmethod
    def megatron(cls, shape: ModelShape) -> Mapping[str, Any]:
        from streamrl.learner.biased_experts import quick_gelu

        attention, moe = shape.attention, shape.moe
        assert attention.window is not None
        assert moe is not None
        return {
            "add_bias_linear": True,
            "window_size": (attention.window - 1, 0),
            "window_attn_skip_freq": [int(layer in attention.windowed) for layer in range(shape.layers)],
            "softmax_type": "learnable",
            "activation_func": quick_gelu,
            "activation_func_clamp_value": moe.clamp,
            "glu_linear_offset": 1.0,
        }

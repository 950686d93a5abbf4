"""The family `deepseek_v3`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families._sigmoid_experts import IN_A_SIGMOID_LAYER, SigmoidExperts
from streamrl.learner.families.base import Entry
from streamrl.learner.shape import LatentShape, ModelShape, MoeShape, UnsupportedModelError, need

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from streamrl.config.learner import LoraTarget

_ATTENTION = "self_attention."
_OF_LATENTS: Mapping[str, Entry] = {
    "linear_q_proj.weight": ("rows", ("self_attn.q_proj.weight",)),
    "linear_q_down_proj.weight": ("replicated", ("self_attn.q_a_proj.weight",)),
    "q_layernorm.weight": ("replicated", ("self_attn.q_a_layernorm.weight",)),
    "linear_q_up_proj.weight": ("rows", ("self_attn.q_b_proj.weight",)),
    "linear_kv_down_proj.weight": ("replicated", ("self_attn.kv_a_proj_with_mqa.weight",)),
    "kv_layernorm.weight": ("replicated", ("self_attn.kv_a_layernorm.weight",)),
    "linear_kv_up_proj.weight": ("rows", ("self_attn.kv_b_proj.weight",)),
    "linear_proj.weight": ("columns", ("self_attn.o_proj.weight",)),
}
_GROUPS = ("n_group", "topk_group")
_WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class DeepseekV3(SigmoidExperts):
    """DeepSeek-V3 and R1, Moonlight, Kimi-VL's text model: latent attention, experts in groups, shared experts.

    Layers of multi-token prediction are neither trained nor exported. Folders of FP8 weights are refused: dequantise
    them to bfloat16 first.
    """

    architectures = ("DeepseekV3ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4}
    engine = False
    served_adapters = False
    served_blocks = False
    without_adapters: ClassVar[frozenset[LoraTarget]] = frozenset(("linear_qkv",))
    in_a_layer: ClassVar[Mapping[str, Entry]] = {
        **{name: entry for name, entry in IN_A_SIGMOID_LAYER.items() if not name.startswith(_ATTENTION)},
        **{_ATTENTION + name: entry for name, entry in _OF_LATENTS.items()},
    }

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        need(path, config, *_WIDTHS)
        rank, plain, turned, value = (config[key] for key in _WIDTHS)
        if (query_rank := config.get("q_lora_rank")) is not None:
            need(path, config, "q_lora_rank")
        shape = super().read(path, {**config, "head_dim": plain + turned})
        scaling = shape.rope.scaling
        if shape.groups != shape.heads:
            raise UnsupportedModelError(f"{path}: num_key_value_heads={shape.groups}; allowed: {shape.heads}")
        if shape.rope.attention != 1:  # it would be on a part of the dimensions alone
            raise UnsupportedModelError(f"{path}: RoPE mscale and mscale_all_dim differ; allowed: equal ones")
        given = config.get("rope_parameters") or config.get("rope_scaling") or {}
        grown = 1.0
        if scaling is not None and scaling.factor > 1:
            grown += 0.1 * float(given.get("mscale_all_dim") or 0) * math.log(scaling.factor)
        latent = LatentShape(
            query_rank=query_rank,
            rank=rank,
            plain=plain,
            turned=turned,
            value=value,
            scale=grown**2 / math.sqrt(plain + turned),
        )
        rope = replace(shape.rope, interleaved=config.get("rope_interleave", True))
        unbuilt = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0
        return replace(shape, latent=latent, rope=rope, unbuilt_layers=unbuilt)

    @classmethod
    def read_experts(cls, path: Path, config: dict[str, Any]) -> MoeShape | None:
        if (step := config.get("moe_layer_freq", 1)) != 1:
            raise UnsupportedModelError(f"{path}: moe_layer_freq={step!r} is not supported; allowed: 1")
        moe = super().read_experts(path, {key: value for key, value in config.items() if key not in _GROUPS})
        groups, chosen = (config.get(key) or 1 for key in _GROUPS)
        if moe is None or groups == 1:
            return moe
        if moe.experts % groups or not 1 <= chosen <= groups:
            raise UnsupportedModelError(
                f"{path}: n_group={groups}, topk_group={chosen} do not fit {moe.experts} experts; allowed: equal groups"
            )
        if moe.top_k // chosen != 2:  # so many scores Megatron sums for a group; the model sums two
            raise UnsupportedModelError(
                f"{path}: num_experts_per_tok={moe.top_k} with topk_group={chosen} is not supported; allowed: "
                f"{2 * chosen} to {3 * chosen - 1}"
            )
        return replace(moe, groups=groups, group_top_k=chosen)

    @classmethod
    def refuse(cls, path: Path, config: dict[str, Any]) -> None:
        if (config.get("quantization_config") or {}).get("quant_method") == "fp8":
            raise UnsupportedModelError(
                f"{path}: quantization_config says FP8 weights, which are not trained; allowed: a folder that is "
                "dequantised to bfloat16 (inference/fp8_cast_bf16.py of DeepSeek-V3) without this key"
            )
        super().refuse(path, config)

    @classmethod
    def has(cls, shape: ModelShape, name: str, mixture: bool) -> bool:
        if name == "self_attention.linear_q_proj.weight":
            return shape.latent is not None and shape.latent.query_rank is None
        if name.startswith(("self_attention.linear_q_", "self_attention.q_layernorm")):
            return shape.latent is not None and shape.latent.query_rank is not None
        return name.startswith(_ATTENTION) or super().has(shape, name, mixture)

    @classmethod
    def edit(cls, layer: ModuleSpec, config: TransformerConfig) -> None:
        from streamrl.learner.latent_attention import use_latent_attention

        use_latent_attention(layer)

    @classmethod
    def arguments(cls, shape: ModelShape) -> Mapping[str, Any]:
        return {
            **cls.megatron(shape),
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "group_query_attention": False,
        }

    @classmethod
    def megatron(cls, shape: ModelShape) -> Mapping[str, Any]:
        latent = shape.latent
        assert latent is not None
        return {
            "multi_latent_attention": False,  # Megatron's own, in whose place ours is
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.rank,
            "qk_head_dim": latent.plain,
            "qk_pos_emb_head_dim": latent.turned,
            "v_head_dim": latent.value,
            "rotary_base": shape.rope_theta,
        }

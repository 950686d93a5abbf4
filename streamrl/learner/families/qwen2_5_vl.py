"""The family `qwen2_5_vl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families._qwen_vl import QwenVL
from streamrl.learner.vision.shape import VisionShape

if TYPE_CHECKING:
    from torch import nn


class Qwen25VL(QwenVL):
    """Qwen2.5-VL: Qwen2.5 behind a tower of windowed attention, gated MLPs and RMS norms."""

    architectures = ("Qwen2_5_VLForConditionalGeneration",)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}
    qkv_bias = True
    vision_prefix = "visual."
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        "depth": 32,
        "hidden_size": 3584,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "out_hidden_size": 3584,
    }

    @classmethod
    def tower_tensors(cls, vision: VisionShape) -> Mapping[str, tuple[int, ...]]:
        hidden, ffn, merged = vision.hidden, vision.ffn, vision.unit * vision.hidden
        block = {
            "norm1.weight": (hidden,),
            "norm2.weight": (hidden,),
            "attn.qkv.weight": (3 * hidden, hidden),
            "attn.qkv.bias": (3 * hidden,),
            "attn.proj.weight": (hidden, hidden),
            "attn.proj.bias": (hidden,),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.gate_proj.bias": (ffn,),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.up_proj.bias": (ffn,),
            "mlp.down_proj.weight": (hidden, ffn),
            "mlp.down_proj.bias": (hidden,),
        }
        return {
            "patch_embed.proj.weight": (hidden, vision.channels, vision.temporal, vision.patch, vision.patch),
            **{f"blocks.{index}.{name}": size for index in range(vision.depth) for name, size in block.items()},
            "merger.ln_q.weight": (hidden,),
            "merger.mlp.0.weight": (merged, merged),
            "merger.mlp.0.bias": (merged,),
            "merger.mlp.2.weight": (vision.out, merged),
            "merger.mlp.2.bias": (vision.out,),
        }

    @classmethod
    def tower(cls, vision: VisionShape) -> nn.Module:
        from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl

        config = configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(**vision.config)
        config._attn_implementation = "sdpa"
        return modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(config)

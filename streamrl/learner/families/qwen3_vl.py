"""The family `qwen3_vl`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families._qwen_vl import QwenVL
from streamrl.learner.families.base import EMBEDDING, OUTPUT, Entry
from streamrl.learner.vision.shape import VisionShape

if TYPE_CHECKING:
    from torch import nn


class Qwen3VL(QwenVL):
    """Qwen3-VL, dense: Qwen3 behind a tower with learned positions, whose features enter its first layers as well."""

    architectures = ("Qwen3VLForConditionalGeneration",)
    qk_norm = True
    head_dim: ClassVar[int | None] = 128
    vision_prefix = "model.visual."
    layers_prefix = "model.language_model.layers."
    outside_layers: ClassVar[Mapping[str, Entry]] = {
        EMBEDDING: ("vocabulary", ("model.language_model.embed_tokens.weight",)),
        "decoder.final_layernorm.weight": ("replicated", ("model.language_model.norm.weight",)),
        OUTPUT: ("vocabulary", ("lm_head.weight",)),
    }
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": (8, 16, 24),
    }

    @classmethod
    def tower_tensors(cls, vision: VisionShape) -> Mapping[str, tuple[int, ...]]:
        hidden, ffn, merged = vision.hidden, vision.ffn, vision.unit * vision.hidden
        block = {
            **_norm("norm1", hidden),
            **_norm("norm2", hidden),
            **_linear("attn.qkv", hidden, 3 * hidden),
            **_linear("attn.proj", hidden, hidden),
            **_linear("mlp.linear_fc1", hidden, ffn),
            **_linear("mlp.linear_fc2", ffn, hidden),
        }
        merger = {**_linear("linear_fc1", merged, merged), **_linear("linear_fc2", merged, vision.out)}
        level = {**_norm("norm", merged), **merger}
        return {
            "patch_embed.proj.weight": (hidden, vision.channels, vision.temporal, vision.patch, vision.patch),
            "patch_embed.proj.bias": (hidden,),
            "pos_embed.weight": (vision.config["num_position_embeddings"], hidden),
            **{f"blocks.{index}.{name}": size for index in range(vision.depth) for name, size in block.items()},
            **{f"merger.{name}": size for name, size in {**_norm("norm", hidden), **merger}.items()},
            **{
                f"deepstack_merger_list.{index}.{name}": size
                for index in range(vision.levels)
                for name, size in level.items()
            },
        }

    @classmethod
    def tower(cls, vision: VisionShape) -> nn.Module:
        from transformers.models.qwen3_vl import configuration_qwen3_vl, modeling_qwen3_vl

        given = {**vision.config, "model_type": "qwen3_vl_vision"}
        config = configuration_qwen3_vl.Qwen3VLVisionConfig(**given)
        config._attn_implementation = "sdpa"
        return modeling_qwen3_vl.Qwen3VLVisionModel(config)


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}

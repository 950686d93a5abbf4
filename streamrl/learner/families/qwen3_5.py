"""The family `qwen3_5`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families._delta_nets import IN_A_DELTA_LAYER, IN_PROJ, DeltaNets, delta_of, key_heads, mixed
from streamrl.learner.families.base import Entry
from streamrl.learner.families.qwen3_vl import Qwen3VL
from streamrl.learner.shape import ModelShape
from streamrl.learner.vision.shape import VisionShape

if TYPE_CHECKING:
    from torch import nn

    from streamrl.learner.mapping import Cut


class Qwen35(Qwen3VL, DeltaNets):
    """Qwen3.5, dense: gated delta nets among gated attention, behind Qwen3-VL's tower without deepstack."""

    architectures = ("Qwen3_5ForConditionalGeneration",)
    head_dim = 256
    in_a_layer: ClassVar[Mapping[str, Entry]] = {
        **IN_A_DELTA_LAYER,
        IN_PROJ: ("delta_in", tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))),
    }
    vision_defaults: ClassVar[Mapping[str, Any]] = {
        name: size for name, size in Qwen3VL.vision_defaults.items() if name != "deepstack_visual_indexes"
    }

    @classmethod
    def cuts(cls) -> Mapping[str, Cut]:
        from streamrl.learner.mapping import by_group

        def others(shape: ModelShape) -> tuple[int, int, int]:
            """Rows of the gates, of beta, of alpha."""
            delta = delta_of(shape)
            return delta.values * delta.value, delta.values, delta.values

        return {**super().cuts(), "delta_in": by_group(mixed, key_heads, others)}

    @classmethod
    def tower(cls, vision: VisionShape) -> nn.Module:
        from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5

        given = {**vision.config, "model_type": "qwen3_5_vision"}
        config = configuration_qwen3_5.Qwen3_5VisionConfig(**given)
        config._attn_implementation = "sdpa"
        return modeling_qwen3_5.Qwen3_5VisionModel(config)

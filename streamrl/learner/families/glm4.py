"""The family `glm4`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from streamrl.learner.families.base import IN_A_LAYER, Entry, ModelFamily

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


class Glm4(ModelFamily):
    """GLM-4-0414, GLM-Z1, dense: a norm before and behind each part, pairs of neighbours turned in half of a head.

    Its folders have gate and up projection in one tensor, of which an adapter would have one A for both.
    """

    architectures = ("Glm4ForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1.5625e-7}
    attention_bias = True
    head_dim = 128
    rotary_part = 0.5
    rotary_interleaved = True
    norms_in_a_layer = 4
    without_adapters = frozenset(("linear_fc1",))
    in_a_layer: ClassVar[Mapping[str, Entry]] = {
        **IN_A_LAYER,
        "self_attn_bda.norm.weight": ("replicated", ("post_self_attn_layernorm.weight",)),
        "mlp_bda.norm.weight": ("replicated", ("post_mlp_layernorm.weight",)),
        "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_up_proj.weight",)),
    }

    @classmethod
    def edit(cls, layer: ModuleSpec, config: TransformerConfig) -> None:
        from streamrl.learner.sandwich import add_norms

        add_norms(layer, config)

"""The family `mixtral`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from streamrl.learner.families.base import IN_A_LAYER, Entry, ModelFamily
from streamrl.learner.shape import ModelShape, MoeShape, UnsupportedModelError, need


class Mixtral(ModelFamily):
    """Mixtral 8x7B, 8x22B: each layer a mixture of experts, weights that sum to 1. Its router's noise is not applied.

    SGLang reads neither a width of heads nor a scaling of the rotary embedding for it, so both are refused.
    """

    architectures = ("MixtralForCausalLM",)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
    experts = True
    served_adapters = False
    served_blocks = False
    in_a_layer: ClassVar[Mapping[str, Entry]] = {
        **IN_A_LAYER,
        "mlp.router.weight": ("replicated", ("block_sparse_moe.gate.weight",)),
    }
    in_an_expert: ClassVar[Mapping[str, Entry]] = {
        "linear_fc1": ("gate_and_up", tuple(f"block_sparse_moe.experts.{{}}.{w}.weight" for w in ("w1", "w3"))),
        "linear_fc2": ("columns", ("block_sparse_moe.experts.{}.w2.weight",)),
    }

    @classmethod
    def read(cls, path: Path, config: dict[str, Any]) -> ModelShape:
        shape = super().read(path, config)
        if shape.rope.scaling is not None:
            raise UnsupportedModelError(
                f"{path}: RoPE scaling {shape.rope.scaling.kind!r} is not supported for Mixtral; allowed: 'default'"
            )
        if shape.head_dim * shape.heads != shape.hidden:
            raise UnsupportedModelError(
                f"{path}: head_dim={shape.head_dim} is not supported; allowed: {shape.hidden // shape.heads}"
            )
        return shape

    @classmethod
    def read_experts(cls, path: Path, config: dict[str, Any]) -> MoeShape | None:
        need(path, config, "num_local_experts", "num_experts_per_tok")
        width = {"moe_intermediate_size": config["intermediate_size"], "norm_topk_prob": True}
        return super().read_experts(path, config | width)

    @classmethod
    def refuse(cls, path: Path, config: dict[str, Any]) -> None:
        super().refuse(path, config)
        cls._refuse_window(path, config, None)

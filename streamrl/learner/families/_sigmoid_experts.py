"""Experts that sigmoids choose, with shared experts beside them and dense layers before them: what families share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.learner.families.base import IN_A_LAYER, Entry, ModelFamily, need_values
from streamrl.learner.shape import MoeShape, UnsupportedModelError, need

IN_A_SIGMOID_LAYER: Mapping[str, Entry] = {
    **IN_A_LAYER,
    "mlp.router.expert_bias": ("replicated", ("mlp.gate.e_score_correction_bias",)),
    "mlp.shared_experts.linear_fc1.weight": (
        "gate_and_up",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
    ),
    "mlp.shared_experts.linear_fc2.weight": ("columns", ("mlp.shared_experts.down_proj.weight",)),
}

# Of `config.json`: what is built, which is also what a configuration without the key means.
BUILT = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


class SigmoidExperts(ModelFamily):
    """DeepSeek-V3's router (arXiv 2412.19437, section 2.1.2) in one group; Megatron's always normalises."""

    experts = True
    in_a_layer = IN_A_SIGMOID_LAYER

    @classmethod
    def read_experts(cls, path: Path, config: dict[str, Any]) -> MoeShape | None:
        need(path, config, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
        experts, top_k = config["n_routed_experts"], config["num_experts_per_tok"]
        if not 2 <= top_k <= experts:
            problem = f"num_experts_per_tok={top_k} is not supported; allowed: 2 to {experts}"
            raise UnsupportedModelError(f"{path}: {problem}")
        need_values(path, config, BUILT)
        layers = config["num_hidden_layers"]
        dense = min(config.get("first_k_dense_replace", 0), layers)
        if dense == layers:
            return None
        return MoeShape(
            experts=experts,
            top_k=top_k,
            ffn=config["moe_intermediate_size"],
            normalised=True,
            dense_layers=tuple(range(dense)),
            sigmoid=True,
            scaling=float(config.get("routed_scaling_factor", 1.0)),
            shared_ffn=config["moe_intermediate_size"] * config["n_shared_experts"],
        )

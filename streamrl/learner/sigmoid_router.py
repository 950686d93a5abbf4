"""Routers of sigmoid scores with a correction bias for each expert, which is a buffer and stays as it was loaded.

    choice   the largest of sigmoid(logit) + bias
    weights  the sigmoids of the chosen, divided by their sum, times a constant

The bias was moved while the model was pretrained, by how many tokens each expert had. It has no gradient; Megatron
would go on to move it at each step, by a rate that is not 0 unless it is set, so that learner and servers would choose
otherwise than the folder says. Here it is frozen: loaded, published and exported with the same bits, in float32.
"""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt import GPTModel

from streamrl.learner.shape import MoeShape


def fields(moe: MoeShape) -> dict[str, Any]:
    """Of Megatron's TransformerConfig; none for a softmax."""
    if not moe.sigmoid:
        return {}
    groups = {"moe_router_num_groups": moe.groups, "moe_router_group_topk": moe.group_top_k} if moe.groups > 1 else {}
    return {
        **groups,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": moe.scaling,
        "moe_router_dtype": "fp32",
    }


def freeze(model: GPTModel) -> None:
    """Have nothing counted and nothing exchanged for the biases of a model chunk. Once, when it is built."""
    if not model.config.moe_router_enable_expert_bias:
        return
    model.config.moe_router_enable_expert_bias = False  # read again at each step, for the update
    for layer in model.decoder.layers:
        if (router := getattr(layer.mlp, "router", None)) is not None:
            router.enable_expert_bias = False
            router._apply_expert_bias = _uncounted


def keep_float32(model: GPTModel) -> None:
    """Have the biases in float32 again, before they are loaded: Megatron casts a model with all of its buffers."""
    for layer in model.decoder.layers:
        if (router := getattr(layer.mlp, "router", None)) is not None:
            router._maintain_float32_expert_bias()


def _uncounted(routing_map: Any, padding_mask: Any = None) -> None:
    """In the place of Megatron's count of each expert's tokens, which it compiles."""

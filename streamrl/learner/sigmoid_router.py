"""Routers of sigmoid scores with a correction bias for each expert, which is a buffer and stays as it was loaded.

    choice   the largest of sigmoid(logit) + bias
    weights  the sigmoids of the chosen, divided by their sum, times a constant

The bias was moved while the model was pretrained, by how many tokens each expert had. It has no gradient; Megatron
would go on to move it at each step, by a rate that is not 0 unless it is set, so that learner and servers would choose
otherwise than the folder says. Here it is frozen: loaded, published and exported with the same bits, in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.core.models.gpt import GPTModel

from streamrl.learner.shape import MoeShape


def fields(moe: MoeShape) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig; none for a softmax."""
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


def freeze(chunks: Sequence[GPTModel]) -> None:
    """Have nothing counted and nothing exchanged for the biases. Once, when all chunks of a rank are built."""
    for model in chunks:
        model.config.moe_router_enable_expert_bias = False  # the chunks share it; each step's update reads it again
        for router in _routers(model):
            router.enable_expert_bias = False
            router._apply_expert_bias = _uncounted


@contextmanager
def biases_kept(model: GPTModel) -> Iterator[None]:
    """The biases are float32 and what they were, behind the block: Megatron casts a model with all of its buffers."""
    kept = [(router, router.expert_bias) for router in _routers(model)]
    yield
    for router, bias in kept:
        router.expert_bias = bias


def _routers(model: GPTModel) -> Iterator[Any]:
    """Those of them that have a bias."""
    routers = (getattr(layer.mlp, "router", None) for layer in model.decoder.layers)
    return (router for router in routers if router is not None and router.expert_bias is not None)


def _uncounted(routing_map: Any, padding_mask: Any = None) -> None:
    """In the place of Megatron's count of each expert's tokens, which it compiles."""

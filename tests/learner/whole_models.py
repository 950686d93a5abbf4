"""Tiny random models of architectures that streamrl has no file for, and configurations that transformers builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.testing.families import random_model

# transformers' class, what its configuration needs, how its rows are made, whether its logits are one product.
FOREIGN: dict[str, tuple[str, dict[str, Any], str, bool]] = {
    "olmo2": ("Olmo2ForCausalLM", {"pad_token_id": 5}, "shared", True),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 3.0, "embedding_multiplier": 2.0}, "shared", False),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}, "shared", True),
    "windows": ("MistralForCausalLM", {"sliding_window": 5, "head_dim": 16}, "shared", True),
    "masks": (
        "Qwen2MoeForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
        "packed",
        True,
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_positions": 256, "n_inner": 96}, "shared", True),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, "final_logit_softcapping": 3.0},
        "packed",
        False,
    ),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True}, "packed", True),
    "mamba": ("MambaForCausalLM", {"state_size": 4}, "alone", True),
}


def write_foreign(folder: Path, name: str) -> Path:
    """Save one of FOREIGN, as transformers does. Returns `folder`."""
    model_class, needed, *_ = FOREIGN[name]
    random_model(model_class, **needed).save_pretrained(folder)
    return folder


def whole(config: Config, **changed: Any) -> Config:
    """The configuration with transformers' models, and some keys of its tree."""
    tree = config.model_dump()
    tree["model"]["implementation"] = "transformers"
    for key, value in changed.items():
        tree[key] |= value
    return Config.model_validate(tree)

"""The family `qwen3_moe`."""

from __future__ import annotations

from streamrl.learner.families.base import ModelFamily


class Qwen3Moe(ModelFamily):
    """Qwen3 with mixtures of experts."""

    architectures = ("Qwen3MoeForCausalLM",)
    qk_norm = True
    experts = True

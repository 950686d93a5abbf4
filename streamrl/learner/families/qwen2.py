"""The family `qwen2`."""

from __future__ import annotations

from streamrl.learner.families.base import ModelFamily


class Qwen2(ModelFamily):
    """Qwen2, Qwen2.5 and models distilled into them."""

    architectures = ("Qwen2ForCausalLM",)
    qkv_bias = True

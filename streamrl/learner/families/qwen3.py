"""The family `qwen3`."""

from __future__ import annotations

from streamrl.learner.families.base import ModelFamily


class Qwen3(ModelFamily):
    """Qwen3, dense."""

    architectures = ("Qwen3ForCausalLM",)
    qk_norm = True
    head_dim = 128

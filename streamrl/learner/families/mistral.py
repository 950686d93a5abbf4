"""The family `mistral`."""

from __future__ import annotations

from streamrl.learner.families.base import ModelFamily


class Mistral(ModelFamily):
    """Mistral."""

    architectures = ("MistralForCausalLM",)
    sliding_window = 4096

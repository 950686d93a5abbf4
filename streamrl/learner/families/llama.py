"""The family `llama`."""

from __future__ import annotations

from streamrl.learner.families.base import ModelFamily


class Llama(ModelFamily):
    """Llama 3 and models of its architecture."""

    architectures = ("LlamaForCausalLM",)

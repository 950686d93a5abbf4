"""The family `seed_oss`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamrl.learner.families.base import ModelFamily
from streamrl.learner.shape import UnsupportedModelError


class SeedOss(ModelFamily):
    """Seed-OSS: biases on queries, keys and values as `config.json` says. Its dropouts are not applied.

    SGLang has no class of its own for it: it serves transformers' (`model_impl: auto`).
    """

    architectures = ("SeedOssForCausalLM",)
    attention_bias = True
    head_dim = 128

    @classmethod
    def refuse(cls, path: Path, config: dict[str, Any]) -> None:
        super().refuse(path, config)
        if config.get("attention_out_bias", False):
            raise UnsupportedModelError(f"{path}: attention_out_bias=True is not supported; allowed: False")

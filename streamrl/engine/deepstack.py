"""Qwen3-VL's mixtures of experts have as many levels of deepstack in a server as in `config.json`.

SGLang 0.5.23 always adds three, as the published models have. A model with fewer ends its server at the first image,
and of one with more the further levels would be dropped in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamrl.engine.model_config import architectures

ARCHITECTURE = "Qwen3VLMoeForConditionalGeneration"


def has_levels(model: Path) -> bool:
    """Whether a Hugging Face folder has a model whose levels SGLang does not ask for."""
    return ARCHITECTURE in architectures(model)


def install() -> None:
    """In each of SGLang's processes, before its model is built."""
    from sglang.srt.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

    Qwen3VLMoeForConditionalGeneration.__init__ = with_levels(Qwen3VLMoeForConditionalGeneration.__init__)


def with_levels(build: Callable[..., None]) -> Callable[..., None]:
    """`build`, and its language model then adds what the tower gives."""

    def build_with_levels(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        build(self, config, *arguments, **named)
        levels = range(len(config.vision_config.deepstack_visual_indexes))
        self.model.deepstack_embed_to_decoder_layer = levels

    return build_with_levels

"""Servers that a run starts decode the images of prompts by PIL, as the learner does.

SGLang 0.5.23 decodes JPEG on a GPU, with other pixels, also where `disable_fast_image_processor` asks for PIL's
processor: what its log-probs are of would be another image than the one that is trained.
"""

from __future__ import annotations

import json
from pathlib import Path


def reads_images(model: Path) -> bool:
    """Whether a Hugging Face folder has a model with a vision tower. What else is in it, SGLang says."""
    try:
        return json.loads((model / "config.json").read_bytes()).get("vision_config") is not None
    except (OSError, ValueError, AttributeError):
        return False


def install() -> None:
    """In each of SGLang's processes, before its image processor is made."""
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    BaseMultimodalProcessor.gpu_image_decode = False

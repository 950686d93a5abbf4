"""Servers that a run starts decode the images of prompts by PIL, as the learner does.

SGLang 0.5.23 decodes JPEG on a GPU, with other pixels, also where `disable_fast_image_processor` asks for PIL's
processor: what its log-probs are of would be another image than the one that is trained.
"""

from __future__ import annotations

from pathlib import Path

from streamrl.engine.model_config import read


def reads_images(model: Path) -> bool:
    """Whether a Hugging Face folder has a model with a vision tower."""
    return read(model).get("vision_config") is not None


def install() -> None:
    """In each of SGLang's processes, before its image processor is made."""
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    BaseMultimodalProcessor.gpu_image_decode = False

"""What a Hugging Face vision-language model is given of the images of prompts, by transformers' own processor."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedModel


def image_inputs(model: PreTrainedModel, folder: str, ids: Tensor, images: Sequence[Sequence[bytes]]) -> dict[str, Any]:
    """Keyword arguments of a forward pass on ids [B, T], with the encoded images of each row; none without an image.

    folder: of the model, with its image processor.
    """
    files = [file for row in images for file in row]
    if not files:
        return {}
    opened = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    given = _processor(folder)(images=opened, return_tensors="pt")
    kinds = (ids == model.config.image_token_id).int()
    for row, of_row in enumerate(images):
        if not of_row:  # an image token that was drawn is a token like any other
            kinds[row] = 0
    grids = given["image_grid_thw"]
    return {
        "pixel_values": given["pixel_values"].to(torch.float32),
        "image_grid_thw": grids,
        "mm_token_type_ids": kinds,
    }


@cache
def _processor(folder: str) -> Any:
    return AutoImageProcessor.from_pretrained(folder)

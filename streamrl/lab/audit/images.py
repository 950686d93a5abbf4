"""What a Hugging Face vision-language model is given of the images of prompts, by transformers' own processor."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedModel


@contextmanager
def image_inputs(
    model: PreTrainedModel, folder: str, ids: Tensor, prompts: Sequence[tuple[int, Sequence[bytes]]]
) -> Iterator[dict[str, Any]]:
    """Keyword arguments of a forward pass on ids [B, T]; it has to be made inside the block.

    folder: of the model, with its image processor. prompts: of each row, tokens and encoded images. An image token that
    was drawn is a token like any other: it goes in by an id of its own, and has the row of an image token, so that
    nothing looks for an image there.
    """
    files = [file for _, row in prompts for file in row]
    if not files:
        yield {"input_ids": ids}
        return
    token, table = model.config.image_token_id, model.get_input_embeddings()
    assert isinstance(table, nn.Embedding)
    own = table.num_embeddings
    opened = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
    given = _processor(folder)(images=opened, return_tensors="pt")
    asked = ids.clone()
    for row, (length, of_row) in enumerate(prompts):
        answer = asked[row, length if of_row else 0 :]
        answer[answer == token] = own
    hook = table.register_forward_pre_hook(lambda _, args: (args[0].masked_fill(args[0] == own, token),))
    try:
        yield {
            "input_ids": asked,
            "pixel_values": given["pixel_values"].to(model.dtype),
            "image_grid_thw": given["image_grid_thw"],
            "mm_token_type_ids": (asked == token).int(),
        }
    finally:
        hook.remove()


@cache
def _processor(folder: str) -> Any:
    return AutoImageProcessor.from_pretrained(folder)

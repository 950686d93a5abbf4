"""Multimodal rotary positions (Qwen2-VL, arXiv 2409.12191, section 2.1), and the angles that are made of them.

text    time = row = column, which count up
image   time does not change, row and column are those of the token in the image; the text behind goes on after the
        largest of them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from streamrl.learner.vision.shape import VisionShape

if TYPE_CHECKING:
    from torch import Tensor


def place_images(ids: np.ndarray, grids: np.ndarray, vision: VisionShape) -> tuple[np.ndarray, np.ndarray]:
    """Positions int64 [3, T] of the tokens of a prompt, and the places int64 [n] in it of its images' tokens.

    ids: int64 [T]; grids: int64 [images, 3], patches in time, rows and columns. The first runs of image tokens are
    the images', in order; image tokens behind them are text. Raises ValueError where a run is too short.
    """
    image_tokens = np.flatnonzero(ids == vision.image)
    positions = np.empty((3, len(ids)), np.int64)
    end, position, taken = 0, 0, 0  # in the row, of the next token, of the image tokens
    for number, (time, rows, columns) in enumerate(grids // [1, vision.merge, vision.merge]):
        count = int(time * rows * columns)
        run = image_tokens[taken : taken + count]
        if len(run) < count or run[-1] - run[0] != count - 1:
            raise ValueError(
                f"image {number} of a prompt has {count} tokens, the prompt has not so many image tokens in a row there"
            )
        position = _text(positions[:, end : run[0]], position)
        positions[:, run] = position + np.indices((time, rows, columns)).reshape(3, -1)
        position += int(max(time, rows, columns))
        end, taken = int(run[-1]) + 1, taken + count
    _text(positions[:, end:], position)
    return positions, image_tokens[:taken]


def _text(positions: np.ndarray, first: int) -> int:
    """Count up from `first`; returns the position behind."""
    positions[:] = first + np.arange(positions.shape[1])
    return first + positions.shape[1]


def angles(positions: Tensor, frequencies: Tensor, axes: Tensor) -> Tensor:
    """RoPE angles float32 [T, 1, 1, d] of positions int64 [3, T].

    frequencies: float32 [d / 2]; axes: int64 [d / 2], `VisionShape.axes`.
    """
    import torch

    half = positions[axes].t().float() * frequencies
    return torch.cat([half, half], -1)[:, None, None]

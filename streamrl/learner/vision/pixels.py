"""From encoded images to the patches that a vision tower takes, by the image processor of the model's folder.

The processor is the one that transformers chooses, as it does for SGLang: by torchvision where that is installed, else
by PIL. Here it always computes on the CPU.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

# Bytes of patches that a process keeps: a step's log-probs, reference and gradient see each image again.
KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class Pixels:
    """One image. Example: 336 x 448 pixels of Qwen2.5-VL are `values` [768, 1176] and `grid` [1, 24, 32]."""

    values: np.ndarray  # float32 [patches, patch_dim]
    grid: np.ndarray  # int64 [3], patches in time, rows and columns


@dataclass(slots=True)
class ImageReader:
    """The images of one model's prompts; those read last are kept, by their content.

    Usage:
        image_reader(folder).read(png).grid
    """

    folder: Path  # of the model
    limit: int = KEPT_BYTES
    _kept: OrderedDict[bytes, Pixels] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _processor: Any = None  # made for the first image

    def read(self, file: bytes) -> Pixels:
        """Raises ValueError for what is no image, OSError where the folder has no image processor."""
        key = hashlib.sha256(file).digest()
        with self._lock:
            if (found := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return found
        pixels = self._processed(file)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = pixels
                self._bytes += pixels.values.nbytes
            while self._bytes > self.limit and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].values.nbytes
        return pixels

    def read_all(self, files: Sequence[bytes]) -> list[Pixels]:
        return [self.read(file) for file in files]

    def _processed(self, file: bytes) -> Pixels:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(io.BytesIO(file)) as image:
                picture = image.convert("RGB")
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError, SyntaxError) as error:
            raise ValueError(f"an image of {len(file)} bytes cannot be read: {error}") from error
        with self._lock:
            if self._processor is None:
                from transformers import AutoImageProcessor

                self._processor = AutoImageProcessor.from_pretrained(self.folder)
        given = self._processor(images=[picture], return_tensors="np")
        (grid,) = given["image_grid_thw"]
        return Pixels(np.ascontiguousarray(given["pixel_values"], np.float32), np.asarray(grid, np.int64))


@cache
def image_reader(folder: Path) -> ImageReader:
    """The reader of a model's folder, one for the whole process."""
    return ImageReader(folder)

"""What `config.json` says of a vision tower, and of the positions that image tokens have. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOWER = "vision.tower."  # in front of the names of a tower's parameters in a model


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """A vision tower in front of a language model, and the model's multimodal rotary positions.

    Example: Qwen3-VL-8B has `VisionShape(image=151655, merge=2, patch=16, temporal=2, channels=3, hidden=1152,
    ffn=4304, depth=27, out=4096, levels=3, sections=(24, 20, 20), interleaved=True, ...)`.
    """

    image: int  # token that the features of images replace
    merge: int  # patches along each side of a square that becomes one token
    patch: int  # pixels along each side of a patch
    temporal: int  # frames of a patch
    channels: int
    hidden: int  # of the tower
    ffn: int
    depth: int
    out: int  # of a feature: hidden of the language model
    levels: int  # of deepstack: so many first layers of the language model get further features
    sections: tuple[int, ...]  # frequencies whose angles are by time, by row, by column
    interleaved: bool  # time, row and column take turns, as far as their sections reach
    config: Mapping[str, Any]  # `vision_config`
    tensors: Mapping[str, tuple[int, ...]]  # shape of each of the tower's tensors, by its name in the tower

    @property
    def unit(self) -> int:
        """Patches of one token."""
        return self.merge**2

    @property
    def patch_dim(self) -> int:
        """Values of one patch."""
        return self.channels * self.temporal * self.patch**2

    @property
    def input(self) -> tuple[int, ...]:
        """What prompts and patches are made for."""
        return (self.image, self.merge, self.patch, self.temporal, self.channels)

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())

    @property
    def products(self) -> int:
        """Multiplications by weights that one image token takes: of its patches, and of the mergers."""
        sizes = {name: math.prod(shape) for name, shape in self.tensors.items() if len(shape) > 1}
        patches = sum(size for name, size in sizes.items() if name.startswith(("blocks.", "patch_embed.")))
        return self.unit * patches + sum(size for name, size in sizes.items() if "merger" in name)

    @property
    def axes(self) -> list[int]:
        """For each frequency the position that its angle follows: 0 time, 1 row, 2 column.

        Example: sections (2, 1, 1) are [0, 0, 1, 2], and interleaved [0, 1, 2, 0].
        """
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        axes = [0] * sum(self.sections)
        for axis, count in enumerate(self.sections[1:], 1):
            axes[axis : 3 * count : 3] = [axis] * len(axes[axis : 3 * count : 3])
        return axes

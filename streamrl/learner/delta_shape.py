"""Sizes of gated delta-net layers. Pure: as `shape.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape:
    """Gated delta-net layers (arXiv 2412.06464) in the place of attention.

    Example: Qwen3-Next-80B-A3B has `DeltaShape(layers=(0, 1, 2, 4, ...), keys=16, values=32, key=128, value=128,
    kernel=4)`.
    """

    layers: tuple[int, ...]  # from 0
    keys: int  # heads of queries and keys
    values: int  # heads of values, a multiple
    key: int  # width of a query or key
    value: int  # width of a value head
    kernel: int  # tokens of the convolution

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys * self.key + self.values * self.value

    @property
    def projected(self) -> int:
        """Outputs of the projection that a layer begins with: the channels, gates, two numbers a value head."""
        return self.channels + self.values * (self.value + 2)

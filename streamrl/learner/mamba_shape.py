"""Sizes of Mamba-2 layers, and which layers of a hybrid model they are. Pure: as `shape.py`."""

from __future__ import annotations

from dataclasses import dataclass

CHUNK = 64  # tokens that the scan takes at once

# What a layer of a hybrid model is, by the letters of `hybrid_override_pattern`.
MAMBA = "M"
ATTENTION = "*"
MLP = "-"
EXPERTS = "E"
KINDS = MAMBA + ATTENTION + MLP + EXPERTS


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaShape:
    """Mamba-2 layers (arXiv 2405.21060) among layers of attention, MLPs and experts, each of which is one part alone.

    Example: Nemotron-H-8B has `MambaShape(kinds="M-M-M-M*-M-...", heads=128, head=64, groups=8, state=128, kernel=4)`.
    """

    kinds: str  # a letter of KINDS for each layer
    heads: int
    head: int  # width of one
    groups: int  # of heads that write to their states and read them by the same vectors
    state: int  # width of such a vector
    kernel: int  # tokens of the convolution

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.heads * self.head

    @property
    def mixed(self) -> tuple[int, int, int]:
        """Channels of the convolution: values, what writes to the states, what reads them."""
        return self.inner, self.groups * self.state, self.groups * self.state

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return sum(self.mixed)

    @property
    def parts(self) -> tuple[int, ...]:
        """Outputs of the projection that a layer begins with: gates, the channels, a step for each head."""
        return self.inner, *self.mixed, self.heads

    @property
    def projected(self) -> int:
        """Outputs of the input projection, all `parts` together."""
        return sum(self.parts)

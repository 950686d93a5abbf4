"""Rotary position embedding as `config.json` describes it: the frequencies, scaled the way Hugging Face scales them.

Megatron has arguments for one kind of scaling, with constants of its own. Whatever the kind, a rotary embedding is
its inverse frequencies and a factor on its cosines and sines, so that is what is worked out here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a model's shape is read by processes without torch, which ask for no frequencies
    from torch import Tensor

KINDS = ("default", "linear", "llama3", "yarn")

LONGROPE = "longrope"  # for families that read it themselves, with factors of its own for long sequences

DEFAULT_THETA = 10000.0  # what Hugging Face takes where the configuration has none


class UnknownRopeError(ValueError):
    """The rotary embedding is of a kind that is not built; the text names what and what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """How the frequencies of a longer context are made of those of the first training.

    Example: Llama 3.1 has `RopeScaling(kind="llama3", factor=8, original_length=8192, slow=1, fast=4)`.
    """

    kind: str  # of KINDS, without `default`, or LONGROPE
    factor: float  # times that the context is longer
    original_length: int = 0  # tokens of the context before; not read by `linear`
    slow: float = 1.0  # turns in original_length up to which a frequency is divided by the factor
    fast: float = 1.0  # turns in original_length from which on a frequency stays as it is
    attention: float = 1.0  # factor on cosines and sines
    whole: bool = True  # yarn: the edges of the ramp are rounded to whole dimensions
    short: tuple[float, ...] = ()  # longrope: what each frequency is divided by, up to original_length

    def scale(self, frequencies: Tensor, theta: float) -> Tensor:
        """The inverse frequencies, float32 [d / 2], after scaling."""
        import torch

        if self.kind == "linear":
            return frequencies / self.factor
        if self.kind == LONGROPE:
            return frequencies / torch.tensor(self.short, dtype=torch.float32)
        return self._llama3(frequencies) if self.kind == "llama3" else self._yarn(frequencies, theta)

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Slow frequencies are divided, fast ones stay, between them a mixture (Llama 3.1's model code)."""
        import torch

        lengths = 2 * math.pi / frequencies  # tokens of one turn
        kept = (self.original_length / lengths - self.slow) / (self.fast - self.slow)
        mixed = (1 - kept) * frequencies / self.factor + kept * frequencies
        scaled = torch.where(lengths > self.original_length / self.slow, frequencies / self.factor, mixed)
        return torch.where(lengths < self.original_length / self.fast, frequencies, scaled)

    def _yarn(self, frequencies: Tensor, theta: float) -> Tensor:
        """The same with a ramp over the dimensions instead of the frequencies (arXiv 2309.00071, section 3.2)."""
        import torch

        dimensions = 2 * len(frequencies)
        first, last = (self._dimension(turns, dimensions, theta) for turns in (self.fast, self.slow))
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dimensions - 1)
        width = last - first or 0.001
        kept = 1 - ((torch.arange(len(frequencies), dtype=torch.float32) - first) / width).clamp(0, 1)
        return frequencies / self.factor * (1 - kept) + frequencies * kept

    def _dimension(self, turns: float, dimensions: int, theta: float) -> float:
        """The pair of dimensions that turns this often in the original length, as a real number."""
        return dimensions * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """The rotary embedding of a model. Example: Qwen2.5 has `Rope(theta=1e6, scaling=None)`."""

    theta: float = DEFAULT_THETA
    scaling: RopeScaling | None = None
    part: float = 1.0  # of a head's dimensions, the first ones, that are turned
    interleaved: bool = False  # neighbours are a pair, not a dimension and the one half of them further

    @property
    def attention(self) -> float:
        """Factor on cosines and sines. Queries and keys both have it, so attention scores have its square."""
        return 1.0 if self.scaling is None else self.scaling.attention

    def frequencies(self, head_dim: int) -> Tensor:
        """Inverse frequencies, float32 [part * head_dim / 2], on the CPU: the angle of one position in radians."""
        import torch

        turned = int(head_dim * self.part)
        plain = 1.0 / (self.theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned))
        return plain if self.scaling is None else self.scaling.scale(plain, self.theta)


def read_rope(config: dict[str, Any], part: float | None = None, *, interleaved: bool = False) -> Rope:
    """From `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before). Raises UnknownRopeError.

    part: `partial_rotary_factor` where the configuration has none; None: the family turns whole heads alone.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in KINDS:
        raise UnknownRopeError(f"RoPE scaling {kind!r} is not supported; allowed: {', '.join(KINDS)}")
    rotated = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    scaling = None if kind == "default" else _read_scaling(kind, given, config)
    if part is None:
        if rotated not in (None, 1, 1.0):
            raise UnknownRopeError(f"partial_rotary_factor={rotated!r} is not supported; allowed: 1.0")
        return Rope(theta=theta, scaling=scaling, interleaved=interleaved)
    turned = part if rotated is None else rotated
    if not isinstance(turned, int | float) or not 0 < turned <= 1:
        raise UnknownRopeError(f"partial_rotary_factor={turned!r} is not allowed; allowed: above 0, up to 1.0")
    if scaling is not None and scaling.attention != 1 and turned < 1:  # a factor on scores is one on all dimensions
        raise UnknownRopeError(f"RoPE scaling {kind!r} with partial_rotary_factor={turned!r} is not supported")
    return Rope(theta=theta, scaling=scaling, part=float(turned), interleaved=interleaved)


def _read_scaling(kind: str, given: dict[str, Any], config: dict[str, Any]) -> RopeScaling:
    needed = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
    for key in needed[kind]:
        if given.get(key) is None:
            raise UnknownRopeError(f"RoPE scaling {kind!r} has no {key}; a number is needed")
    factor = float(given["factor"])
    if kind == "linear":
        return RopeScaling(kind=kind, factor=factor)
    length = given.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if not length:
        raise UnknownRopeError(f"RoPE scaling {kind!r} has no original_max_position_embeddings; a number is needed")
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=factor,
            original_length=int(length),
            slow=float(given["low_freq_factor"]),
            fast=float(given["high_freq_factor"]),
        )
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_length=int(length),
        slow=float(given.get("beta_slow") or 1),
        fast=float(given.get("beta_fast") or 32),
        attention=_yarn_attention(factor, given),
        whole=bool(given.get("truncate", True)),
    )


def _yarn_attention(factor: float, given: dict[str, Any]) -> float:
    """The factor on cosines and sines that the folder gives, or the one of the paper: 0.1 ln(factor) + 1."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def grown(scale: float = 1.0) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(given["mscale"]) / grown(given["mscale_all_dim"])
    return grown()

"""What a mask is: it takes far off-policy tokens out of the loss, by setting their weight to 0.

The class is loaded by processes without torch: its methods import it, the module does not.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, ClassVar

from streamrl.choices import Choice, Options

if TYPE_CHECKING:
    from torch import Tensor

    from streamrl.algo.tokens import TokenBatch
    from streamrl.config.algo import AlgoConfig


class Mask(Choice, ABC):
    """Decides for each micro batch (`masked`), or with `whole_step` once a step over all its tokens (`outliers`)."""

    acts = True  # False: no token is masked
    whole_step = False
    edges: ClassVar[tuple[float, float] | None] = None  # what `algo.mask_low` and `mask_high` are by default
    label = "own_mask"  # of the metric weights/masked_LABEL

    def __init__(self, options: Options) -> None:
        """`options`: those of `algo.mask_options`, of the class's own Options."""
        self.options = options

    def masked(self, tokens: TokenBatch, log_correction: Tensor, config: AlgoConfig) -> Tensor:
        """The tokens that it takes of a micro batch: bool [n]. log_correction: as `ImportanceWeight.factors` has it."""
        raise NotImplementedError

    def outliers(self, log_rho: Tensor, config: AlgoConfig) -> Tensor:
        """The tokens that it takes of a step: bool [n]. log_rho: float64 [n], finite."""
        raise NotImplementedError


def outside(log_ratio: Tensor, config: AlgoConfig) -> Tensor:
    """Whether a ratio is outside of what the mask keeps: bool [n]."""
    from streamrl.algo.importance import mask_edges
    from streamrl.algo.ratios import bounded_exp

    ratio = bounded_exp(log_ratio)
    low, high = mask_edges(config)
    return (ratio < low) | (ratio > high)

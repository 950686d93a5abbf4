"""What takes far off-policy tokens out of the loss: `algo.mask`. `base.py` says what a mask is."""

from __future__ import annotations

from streamrl.algo.masks.base import Mask
from streamrl.config.algo import AlgoConfig


def mask_of(config: AlgoConfig) -> Mask:
    """The mask that `algo.mask` names."""
    declaration: type[Mask] = config.chosen("mask")
    return declaration(declaration.Options.model_validate(config.mask_options))

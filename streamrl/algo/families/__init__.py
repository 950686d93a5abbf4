"""The families of the policy loss: `algo.loss`. `base.py` says what one is."""

from __future__ import annotations

from streamrl.algo.families.base import Family
from streamrl.config.algo import AlgoConfig


def family_of(config: AlgoConfig) -> Family:
    """The family that `algo.loss` names."""
    declaration: type[Family] = config.chosen("loss")
    return declaration(declaration.Options.model_validate(config.loss_options))

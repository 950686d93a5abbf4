"""The proximal policies: `algo.proximal`. `base.py` says what one is."""

from __future__ import annotations

from streamrl.algo.proximals.base import Proximal
from streamrl.config.algo import AlgoConfig


def proximal_of(config: AlgoConfig) -> Proximal:
    """The proximal policy that `algo.proximal` names."""
    declaration: type[Proximal] = config.chosen("proximal")
    return declaration(declaration.Options.model_validate(config.proximal_options))

"""The importance weights: `algo.weight`. `base.py` says what one is."""

from __future__ import annotations

from streamrl.algo.weights.base import ImportanceWeight
from streamrl.config.algo import AlgoConfig


def weight_of(config: AlgoConfig) -> ImportanceWeight:
    """The importance weight that `algo.weight` names."""
    declaration: type[ImportanceWeight] = config.chosen("weight")
    return declaration(declaration.Options.model_validate(config.weight_options))

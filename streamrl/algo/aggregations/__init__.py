"""The means over the tokens of an update: `algo.aggregation`. `base.py` says what one is."""

from __future__ import annotations

from streamrl.algo.aggregations.base import Aggregation
from streamrl.config.algo import AlgoConfig


def aggregation_of(config: AlgoConfig) -> Aggregation:
    """The mean that `algo.aggregation` names."""
    declaration: type[Aggregation] = config.chosen("aggregation")
    return declaration(declaration.Options.model_validate(config.aggregation_options))

"""What is done to the tokens of the largest covariance: `algo.covariance`. `base.py` says what one is."""

from __future__ import annotations

from streamrl.algo.regularisers.base import Regulariser
from streamrl.config.algo import AlgoConfig


def regulariser_of(config: AlgoConfig) -> Regulariser:
    """The regulariser that `algo.covariance` names."""
    declaration: type[Regulariser] = config.chosen("covariance")
    return declaration(declaration.Options.model_validate(config.covariance_options))

"""The estimators of a KL divergence from one drawn token: `algo.kl_estimator`. `base.py` says what one is."""

from __future__ import annotations

from streamrl.algo.divergences.base import Divergence
from streamrl.config.algo import AlgoConfig


def divergence_of(config: AlgoConfig, key: str = "kl_estimator") -> Divergence:
    """The estimator that a key of `algo` names."""
    declaration: type[Divergence] = config.chosen(key)
    return declaration(declaration.Options.model_validate(getattr(config, f"{key}_options")))

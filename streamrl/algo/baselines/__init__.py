"""The baselines of the group-relative advantages: `algo.advantage.baseline`. `base.py` says what one is."""

from __future__ import annotations

from streamrl.algo.baselines.base import Baseline
from streamrl.config.algo import AdvantageConfig


def baseline_of(config: AdvantageConfig) -> Baseline:
    """The baseline that `algo.advantage.baseline` names."""
    declaration: type[Baseline] = config.chosen("baseline")
    return declaration(declaration.Options.model_validate(config.baseline_options))

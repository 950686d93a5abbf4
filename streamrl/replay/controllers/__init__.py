"""What steers the adaptive bound: `replay.adaptive.controller`. `base.py` says what a controller is."""

from __future__ import annotations

from streamrl.config.replay import AdaptiveConfig
from streamrl.replay.controllers.base import Controller


def make_controller(config: AdaptiveConfig) -> Controller:
    """The controller that `replay.adaptive.controller` names."""
    declaration: type[Controller] = config.chosen("controller")
    return declaration(config, declaration.Options.model_validate(config.controller_options))

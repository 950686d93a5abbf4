"""Which prompt is asked next: `replay.curriculum`. `base.py` says what a curriculum is."""

from __future__ import annotations

from streamrl.config.replay import ReplayConfig
from streamrl.replay.curricula.base import Curriculum


def make_curriculum(config: ReplayConfig, seed: int) -> Curriculum:
    """The curriculum that `replay.curriculum` names."""
    declaration: type[Curriculum] = config.chosen("curriculum")
    return declaration(seed, declaration.Options.model_validate(config.curriculum_options))

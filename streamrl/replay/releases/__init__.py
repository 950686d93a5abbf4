"""When tickets go out that the bound allows: `replay.release`. `base.py` says what a release policy is."""

from __future__ import annotations

from streamrl.config.replay import ReplayConfig
from streamrl.replay.releases.base import Release


def make_release(config: ReplayConfig) -> Release:
    """The release policy that `replay.release` names."""
    declaration: type[Release] = config.chosen("release")
    return declaration(config.groups_per_step, declaration.Options.model_validate(config.release_options))

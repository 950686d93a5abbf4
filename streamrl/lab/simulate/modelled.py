"""The keys of a configuration whose effect on time and staleness the model knows."""

from __future__ import annotations

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.config.file import ConfigError

# Any other one would be taken and change nothing.
MODELLED = (
    "run.steps", "run.seed", "generate.workers", "generate.servers", "generate.pools", "generate.group_size",
    "generate.groups_in_flight", "generate.submission", "generate.requests_in_flight", "generate.lag",
    "generate.sampling.max_new_tokens", "replay.order", "replay.window",
    "replay.over_age", "replay.groups_per_step", "replay.max_staleness", "replay.max_attempts", "replay.filter.",
    "replay.adaptive.", "replay.release", "replay.reuse", "publish.every", "publish.interruption", "publish.at_once",
    "checkpoint.every",
)  # fmt: skip


def check_modelled(own: Config, config: Config, where: str = "") -> None:
    """Refuse what differs in another key. Raises ConfigError. `where`: what the line begins with."""
    for key in config_file.changed(own, config):
        if not key.startswith(MODELLED):
            raise ConfigError(f"{where}{key}: its effect is not modelled; allowed: {', '.join(MODELLED)}")

"""Several pools of a run: one kind of server is modelled, of which each pool has as many as it says."""

from __future__ import annotations

from typing import Any

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.generate import OF_A_POOL, GenerateConfig
from streamrl.config.words import as_text

# In what a pool may differ from the recorded servers. Anything else may change their speed, or would change nothing.
MODELLED = ("workers", "servers", "groups_in_flight", "requests_in_flight", "sampling.max_new_tokens")


def check_pools(config: Config, recorded: Config, where: str = "") -> None:
    """Raises ConfigError for a pool whose servers are not like those of the first recorded one.

    `where`: what the line begins with.
    """
    known = _kind(recorded.generate.each_pool[0])
    for pool in config.generate.each_pool:
        for key, value in _kind(pool).items():
            if value != known[key]:
                raise ConfigError(
                    f"{where}generate.pools: {key} is {as_text(value)} in {pool.name or 'the only pool'}, and "
                    f"{as_text(known[key])} for the servers that are modelled; allowed: pools that differ in "
                    f"{', '.join(MODELLED)}"
                )


def _kind(pool: GenerateConfig) -> dict[str, Any]:
    """What may differ between pools by the keys' names, without what is modelled."""
    values = {key: getattr(pool, key) for key in OF_A_POOL if key not in ("name", "sampling")}
    values |= {f"sampling.{key}": value for key, value in pool.sampling}
    return {key: value for key, value in values.items() if key not in MODELLED}

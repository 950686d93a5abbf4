"""The bearer tokens of a server, and their way into its process: by the environment, never by the command line.

A command line shows to every user of a machine; an environment only to its own user.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple


class EngineKeys(NamedTuple):
    """What a server asks for; None: it asks for nothing. Without `admin`, `api` opens everything."""

    api: str | None = None  # for /generate and what only looks
    admin: str | None = None  # for what changes weights, pauses or aborts


NO_KEYS = EngineKeys()

# SGLang's argument: the variable that brings its value.
_ON_THE_WAY = {"--api-key": "STREAMRL_API_KEY", "--admin-api-key": "STREAMRL_ADMIN_KEY"}


def key_environment(keys: EngineKeys) -> dict[str, str]:
    """The variables for the process of a server."""
    return {name: key for name, key in zip(_ON_THE_WAY.values(), keys, strict=True) if key is not None}


def take_keys(environment: MutableMapping[str, str]) -> list[str]:
    """SGLang's arguments for the keys in `environment`, which has them no more."""
    words = []
    for argument, name in _ON_THE_WAY.items():
        if (key := environment.pop(name, None)) is not None:
            words += [argument, key]
    return words

"""The configuration of the runs: what is not the default, what differs between them, and the machine.

The keys of SGLang's servers are left out: a page is for others to read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.report.runs import Run

# differ between any two runs, and say nothing
_NAMES = frozenset({"run.name", "run.folder"})

# Of the overrides that may have a server's key, in the place of their value.
LEFT_OUT = "(left out: with a server's key)"
_SECRET = ("generate.server_args", "generate.pools")


def differences(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The keys whose values are not the same in all runs, with the value of each."""
    values = [_values(run.config) for run in runs]
    return [
        {"key": path, "values": [each[path] for each in values], "meaning": field.description}
        for path, field in config_file.fields()
        if path not in _NAMES and len({each[path] for each in values}) > 1
    ]


def describe(run: Run) -> dict[str, Any]:
    """The keys that are not the default, the whole file, and what the run was started with."""
    values, defaults = _values(run.config), _values(Config.model_validate({}))
    return {
        "changed": [
            {"key": path, "value": values[path], "default": defaults[path], "meaning": field.description}
            for path, field in config_file.fields()
            if values[path] != defaults[path]
        ],
        "file": config_file.as_yaml(config_file.shareable(run.config)),
        "environment": _environment(run),
    }


def _environment(run: Run) -> dict[str, Any]:
    """What the run was started with; a key may be in its command."""
    command = run.environment.get("command")
    if not command or config_file.shareable(run.config) == run.config.model_dump(mode="json"):
        return run.environment
    shown = [f"{word.partition('=')[0]}={LEFT_OUT}" if word.startswith(_SECRET) else word for word in command]
    return run.environment | {"command": shown}


def _values(config: Config) -> dict[str, str]:
    """Every key with its value on one line."""
    tree = config_file.shareable(config)
    return {path: _text(tree, path) for path, _ in config_file.fields()}


def _text(tree: dict[str, Any], path: str) -> str:
    value: Any = tree
    for name in path.split("."):
        value = value[name]
    return value if isinstance(value, str) else json.dumps(value)

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

LEFT_OUT = "(a server's key)"


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
    """What the run was started with; a key may be among the overrides of its command."""
    command = run.environment.get("command")
    keys = config_file.server_keys(run.config)
    if not command or not keys:
        return run.environment
    return run.environment | {"command": [_without(keys, word) for word in command]}


def _without(keys: set[str], word: str) -> str:
    for key in keys - {""}:
        word = word.replace(key, LEFT_OUT)
    return word


def _values(config: Config) -> dict[str, str]:
    """Every key with its value on one line."""
    tree = config_file.shareable(config)
    return {path: _text(tree, path) for path, _ in config_file.fields()}


def _text(tree: dict[str, Any], path: str) -> str:
    value: Any = tree
    for name in path.split("."):
        value = value[name]
    return value if isinstance(value, str) else json.dumps(value)

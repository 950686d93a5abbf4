"""Where each key of a configuration was given: in which line of which file, or behind the command.

config.yaml:3: run.sed: unknown key ...        override run.sed: unknown key ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.config.yaml_text import Line

# How a line begins whose key was given behind the command.
OVERRIDE = "override "

# The key that a line begins with, by the rule of all of these lines.
_KEY = re.compile(r"[\w-]+(\.[\w-]+)*(?=:)")


@dataclass(frozen=True, slots=True)
class _Given:
    where: str  # FILE:LINE; empty: behind the command
    is_mapping: bool


class Positions:
    """By dotted path, where a key was given last."""

    def __init__(self) -> None:
        self._of: dict[str, _Given] = {}

    def add_file(self, file: Path, lines: Mapping[str, Line]) -> None:
        """The keys of a file that is laid over what there is."""
        self._of |= {key: _Given(f"{file}:{line.number}", line.is_mapping) for key, line in lines.items()}

    def add_override(self, key: str, value: Any) -> None:
        """A key behind the command, in whose place there is nothing else any more."""
        self._of = {other: given for other, given in self._of.items() if not f"{other}.".startswith(f"{key}.")}
        self._of |= {path: _Given("", is_mapping) for path, is_mapping in _paths(key, value)}

    def located(self, line: str) -> str:
        """The line of a refusal with the place of the key that it begins with, where that is known."""
        found = _KEY.match(line)
        given = self._given(found[0]) if found else None
        if given is None:
            return line
        return f"{given.where}: {line}" if given.where else OVERRIDE + line

    def _given(self, key: str) -> _Given | None:
        """The key itself, a list that it is in, or the section of a file in which it would be."""
        path = key
        while path:
            given = self._of.get(path)
            if given is not None and (path == key or given.where or not given.is_mapping):
                return given
            path = path.rpartition(".")[0]
        return None


def _paths(key: str, value: Any) -> Iterator[tuple[str, bool]]:
    yield key, isinstance(value, dict)
    if isinstance(value, dict | list):
        children = value.items() if isinstance(value, dict) else enumerate(value)
        for name, child in children:
            yield from _paths(f"{key}.{name}", child)

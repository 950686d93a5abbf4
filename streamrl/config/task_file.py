"""The task file of Megatron-RL's form, read into the entries of `task.mix`.

- agent_type: DAPOAgent
  agent_args: {format_reward: 0.0}
  weight: 3
- agent_type: countdown
  agent_args: {}
  evaluation_only: true
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.config import megatron_rl
from streamrl.config.refused import ConfigError
from streamrl.config.yaml_text import Line, parse_with_lines

# Megatron-RL's keys, and what `task.mix` calls them.
KEYS = {"agent_type": "name", "agent_args": "args", "weight": "weight", "evaluation_only": "evaluation_only"}

# Further keys of `task.mix`, for two entries of one type.
OWN = ("label",)

# The key that a refusal of an entry begins with.
_KEY = re.compile(r"\w+(\.\w+)*(?=:)")


def read_entries(file: Path) -> list[dict[str, Any]]:
    """The entries of a task file, with the keys of `task.mix`.

    Raises ValueError with one line for each mistake, which names the file and, where it can, its line.
    """
    try:
        entries, lines = parse_with_lines(file.read_text(), where=file)
    except ConfigError as error:
        raise ValueError(f"file: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not YAML"
        raise ValueError(f"file: {file} cannot be read ({reason}); allowed: a YAML list of entries") from None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"file: {file} holds no list of mappings; allowed: entries of {', '.join(KEYS)}")
    read: list[dict[str, Any]] = []
    mistakes: list[str] = []
    for place, entry in enumerate(entries):
        try:
            read.append(_entry(entry))
        except ValueError as error:
            mistakes += [f"file: {_place(file, lines, place, line)}: {line}" for line in str(error).splitlines()]
    if mistakes:
        raise ValueError("\n".join(mistakes))
    return read


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError, with lines that begin with the key."""
    known = (*KEYS, *OWN)
    for key in entry:
        if key not in known:
            raise ValueError(f"{key}: unknown key {key!r}; allowed: {', '.join(known)}")
    agent_type, args = entry.get("agent_type"), entry.get("agent_args")
    if not isinstance(agent_type, str):
        reason = "agent_type is missing" if agent_type is None else f"{agent_type!r} is not allowed"
        raise ValueError(f"agent_type: {reason}; allowed: the name of an agent or a task")
    if not isinstance(args, dict | None):
        raise ValueError(f"agent_args: {args!r} is not allowed; allowed: a mapping of arguments")
    shared = {KEYS.get(key, key): entry[key] for key in ("weight", "evaluation_only", *OWN) if key in entry}
    return megatron_rl.entry(agent_type, args or {}) | shared


def _place(file: Path, lines: Mapping[str, Line], entry: int, line: str) -> str:
    """FILE:LINE of the key that a refusal begins with, or of the section that it would be in."""
    key = _KEY.match(line)
    path = f"{entry}.{key[0]}" if key else str(entry)
    while path not in lines and "." in path:
        path = path.rpartition(".")[0]
    return f"{file}:{lines[path].number}" if path in lines else str(file)

"""The task file of Megatron-RL's form, read into the entries of `task.mix`.

- agent_type: jsonl
  agent_args: {path: data/sums.jsonl}
  weight: 3
- agent_type: countdown
  agent_args: {}
  evaluation_only: true
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

# Megatron-RL's keys, and what `task.mix` calls them.
KEYS = {"agent_type": "name", "agent_args": "args", "weight": "weight", "evaluation_only": "evaluation_only"}

# Further keys of `task.mix`, for two entries of one type.
OWN = ("label",)


def read_entries(file: Path) -> list[dict[str, Any]]:
    """The entries of a task file, with the keys of `task.mix`. Raises ValueError with one line."""
    try:
        entries = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not YAML"
        raise ValueError(f"file: {file} cannot be read ({reason}); allowed: a YAML list of entries") from None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"file: {file} holds no list of mappings; allowed: entries of {', '.join(KEYS)}")
    return [_entry(entry, f"file: {file} entry {place}") for place, entry in enumerate(entries)]


def _entry(entry: dict[str, Any], where: str) -> dict[str, Any]:
    known = (*KEYS, *OWN)
    for key in entry:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; allowed: {', '.join(known)}")
    if "agent_type" not in entry:
        raise ValueError(f"{where}: agent_type is missing; allowed: a task's name")
    return {KEYS.get(key, key): value for key, value in entry.items()}

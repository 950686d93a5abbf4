"""What the `config.json` of a served model says. What it lacks, SGLang says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read(model: Path) -> dict[str, Any]:
    """The `config.json` of a Hugging Face folder; empty where it cannot be read."""
    try:
        config = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def architectures(model: Path) -> tuple[str, ...]:
    """Names of classes that can build it."""
    names = read(model).get("architectures")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()

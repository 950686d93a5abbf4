"""Code of the user's own, by its name: `package.module:NAME`, or `path/file.py:NAME`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from streamrl.choices import load_file


def load_named(target: str, kind: str) -> Any:
    """What `target` names, a function or a class (`kind`, for the message).

    Raises ValueError where it names none, OSError, ImportError, or whatever its module raises.
    """
    where, separator, name = target.rpartition(":")
    if not separator or not where or not name:
        raise ValueError(f"{target!r} names no {kind}")
    module = load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    named = getattr(module, name, None)
    if not callable(named):
        raise ValueError(f"{where} has no {kind} {name!r}")
    return named

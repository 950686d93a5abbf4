"""Code of the user's own, by its name: `package.module:NAME`, or `path/file.py:NAME`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_named(target: str, kind: str) -> Any:
    """What `target` names, a function or a class (`kind`, for the message).

    Raises ValueError where it names none, OSError, ImportError, or whatever its module raises.
    """
    where, separator, name = target.rpartition(":")
    if not separator or not where or not name:
        raise ValueError(f"{target!r} names no {kind}")
    named = getattr(_load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where), name, None)
    if not callable(named):
        raise ValueError(f"{where} has no {kind} {name!r}")
    return named


def _load_file(path: Path) -> Any:
    """The module of a file; its folder is importable, as it is for a script."""
    path = path.resolve()
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module

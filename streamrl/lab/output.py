"""Where a command writes: looked at before its work, so that none is lost for a folder that is not there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from streamrl.config.file import ConfigError


def check_file(flag: str, path: Path | None, endings: Sequence[str] = ()) -> None:
    """Refuse a file that could not be written, or whose ending (`.json`) is none of `endings`; None is no file.

    flag: of the command line that names it. Raises ConfigError.
    """
    if path is None:
        return
    if endings and path.suffix not in endings:
        raise ConfigError(f"{flag}: {path}; allowed: a file that ends in {' or '.join(endings)}")
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a folder; allowed: a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag}: {path}: {path.parent} is no folder; allowed: a file in a folder that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: {path} cannot be written; allowed: a file in a folder that can be written")


def check_new_folder(flag: str, path: Path | None) -> None:
    """Refuse a folder that has something in it, or could not be made; None is no folder. Raises ConfigError."""
    if path is None:
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{flag}: {path} is not empty; allowed: a new folder")
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: {path}: {there} cannot be written; allowed: a folder that can be written")

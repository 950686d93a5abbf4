"""Where a command writes: looked at before its work, so that none is lost for a folder that is not there."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

from streamrl.config.file import ConfigError
from streamrl.places import run_that_wrote


def check_file(flag: str, path: Path | None, endings: Sequence[str] = ()) -> None:
    """Refuse a file that could not be written, is a part of a run, or has none of the `endings` (`.json`).

    path: None is no file. flag: of the command line that names it. Raises ConfigError.
    """
    if path is not None and (problem := _problem(path, endings)):
        raise ConfigError(f"{flag}: {path}{problem}")


def output_file(text: str) -> Path:
    """The `type` of a flag of argparse that names a file to be written. Raises ArgumentTypeError."""
    if problem := _problem(Path(text), ()):
        raise ArgumentTypeError(f"{text}{problem}")
    return Path(text)


def _problem(path: Path, endings: Sequence[str]) -> str:
    """Why it cannot be written, and what can; empty where it can."""
    if endings and path.suffix not in endings:
        return f"; allowed: a file that ends in {' or '.join(endings)}"
    if path.is_dir():
        return " is a folder; allowed: a file"
    if not path.parent.is_dir():
        return f": {path.parent} is no folder; allowed: a file in a folder that is there"
    if path.exists() and (run := run_that_wrote(path)) is not None:
        return f" is a part of the run {run}; allowed: another file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return " cannot be written; allowed: a file in a folder that can be written"
    return ""


def check_new_folder(flag: str, path: Path | None) -> None:
    """Refuse a folder that has something in it, or could not be made; None is no folder. Raises ConfigError."""
    if path is None:
        return
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{flag}: {path} is not empty; allowed: a new folder")
    if problem := _folder_problem(path):
        raise ConfigError(f"{flag}: {path}{problem}")


def output_folder(text: str) -> Path:
    """The `type` of a flag that names a folder to be written in, made where it is missing. Raises ArgumentTypeError."""
    if problem := _folder_problem(Path(text)):
        raise ArgumentTypeError(f"{text}{problem}")
    return Path(text)


def _folder_problem(path: Path) -> str:
    there = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return ""
    return f": {there} cannot be written; allowed: a folder that can be written"

"""The files that come with streamrl, `configs/` and `launch/runs/`: found by these names in any folder.

In a clone they are at its top, where `streamrl/configs` and `streamrl/launch` lead to; a wheel has them in the package.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

FOLDERS = ("configs", "launch")


def shipped(path: Path) -> Path:
    """`path`; where no such file is in the present folder and one of its name comes with streamrl, that one.

    >>> shipped(Path("my/run.yaml"))
    PosixPath('my/run.yaml')
    """
    below = os.path.relpath(path)
    own = PACKAGE / below
    return own if not path.exists() and Path(below).parts[0] in FOLDERS and own.is_file() else path


def config_path(text: str) -> Path:
    """What a command line calls a configuration, as `shipped` finds it; says so where it is not the user's own file."""
    path = Path(text)
    found = shipped(path)
    if found != path:
        print(f"streamrl: {path} is not in this folder: {found} is read", file=sys.stderr)
    return found

"""Serve an environment of a foreign library: `python streamrl/tasks/foreign/adapter.py LIBRARY ENVIRONMENT`.

It is started by its path, in a virtual environment without streamrl. The package is found beside this file; the folder
that it lies in stays off the path, or every package of streamrl's environment would come along.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

LIBRARIES = ("gymnasium", "verifiers")


def main() -> None:
    """Serve until the end, which ends the process."""
    parser = argparse.ArgumentParser(prog="adapter.py", description=__doc__.partition("\n")[0])
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("environment", help="name of the environment, or path/file.py:NAME")
    parser.add_argument("--options", type=_mapping, default={}, help="JSON object: arguments of the environment")
    parser.add_argument("--settings", type=_mapping, default={}, help="JSON object: arguments of the adapter")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default %(default)s)")
    parser.add_argument("--port", type=int, default=7000, help="0: a free one (default %(default)s)")
    parser.add_argument("--token-file", type=Path, help="file with the bearer token that callers must have")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the prompts (default %(default)s)")
    parser.add_argument("--held-out", type=float, default=0.05, help="share of the prompts that only probes see")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input does")
    options = parser.parse_args()
    _find_streamrl()
    library = importlib.import_module(f"streamrl.tasks.foreign.{options.library}")
    server = importlib.import_module("streamrl.tasks.foreign.server")
    server.run(library.load, options)


def _mapping(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _find_streamrl() -> None:
    """Make `import streamrl` work from here, whatever is installed."""
    if "streamrl" in sys.modules:
        return
    root = Path(__file__).resolve().parents[2]
    specification = importlib.util.spec_from_file_location(
        "streamrl", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert specification is not None
    assert specification.loader is not None
    package = importlib.util.module_from_spec(specification)
    sys.modules["streamrl"] = package
    specification.loader.exec_module(package)


if __name__ == "__main__":
    if sys.path[:1] == [str(Path(__file__).resolve().parent)]:
        sys.path[0] = ""  # `import verifiers` is the library here, and not the file of that name beside this one
    main()

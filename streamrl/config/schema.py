"""The JSON schema of a configuration file: editors complete keys by it, explain them, and underline what is wrong.

A file that streamrl writes names in its first line the schema that is written beside it: so that both are of the same
version, and stay together when the folder is moved or copied; a file inside the installed package would do neither.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from streamrl.config.tree import Config
from streamrl.whole_files import write_whole

NAME = "config.schema.json"
FIRST_LINE = f"# yaml-language-server: $schema={NAME}\n"

# The key of a file, and of no tree, that names the files below it (`config/file.py`).
_BASE = {
    "description": "files that this one builds on, relative to it; it wins over them",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12): each key with its description, default and what is allowed."""
    made = Config.model_json_schema()
    made["properties"] = {"base": _BASE, **made["properties"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **made,
        "title": "A configuration of streamrl",
    }


@cache
def text() -> str:
    """The schema as it is written to a file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


def write_beside(config: Path) -> Path:
    """Write the schema beside a configuration file, unless it is there. Returns its path."""
    path = config.with_name(NAME)
    if not path.is_file() or path.read_text() != text():
        write_whole(path, text())
    return path

"""What a benchmark has measured, a JSON object a line: the same command goes on behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_kept(path: Path) -> list[dict[str, Any]]:
    """The lines in their order; the rest of one whose write was interrupted is cut off the file."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def keep(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")

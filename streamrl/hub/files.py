"""The files of a model that a run reads, and which of them a folder lacks: never code, never pickles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

WEIGHTS_INDEX = "model.safetensors.index.json"

MOST_NAMED = 3  # files that a line names

# How much of a model is needed: its config.json, all but the weights, all.
Part = Literal["shape", "description", "whole"]

_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "tokenizer.model")

# Patterns of what is fetched.
FILES: dict[Part, tuple[str, ...]] = {
    "shape": ("config.json",),
    "description": _DESCRIPTION,
    "whole": (*_DESCRIPTION, "*.safetensors"),
}

# Never below the folder itself (exports to other formats), and no second copy of the weights, as Mistral's have.
IGNORED = ["*/*", "consolidated*"]


def lacking(folder: Path, part: Part) -> list[str]:
    """What of a model's folder is not there: names of files."""
    needed = {"shape": ["config.json"]}.get(part, ["config.json", "tokenizer.json"])
    found = [name for name in needed if not (folder / name).is_file()]
    return found + (_lacking_weights(folder) if part == "whole" else [])


def _lacking_weights(folder: Path) -> list[str]:
    index = folder / WEIGHTS_INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            return []  # the code that reads the weights says what is wrong with it
        return [name for name in sorted(names) if not (folder / name).is_file()]
    whole = any(path.is_file() for path in folder.glob("*.safetensors"))
    return [] if whole else ["model.safetensors"]


def named(files: list[str]) -> str:
    """For a line.

    >>> named(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = len(files) - MOST_NAMED
    return ", ".join(files[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

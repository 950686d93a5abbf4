"""Which lines of a .jsonl file are broken, and how: the library that reads it says less, and without the line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from glob import glob
from itertools import islice
from typing import Any

# The ending of files with a row in each line.
LINES = ".jsonl"

# Lines that are told; a file of another format is broken in all of them.
MOST = 10

_KINDS = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping"}


def broken_lines(pattern: str, needed: Iterable[str] = ()) -> list[str]:
    """`FILE:LINE: what is wrong` for the first MOST broken lines of the files; `needed`: columns that no row may lack.

    A column whose values are of one kind in the first line that has it, and of another one further down, is broken.
    """
    columns = tuple(needed)
    found = (line for file in sorted(glob(pattern, recursive=True)) for line in _of_file(file, columns))
    return list(islice(found, MOST))


def _of_file(file: str, needed: tuple[str, ...]) -> Iterator[str]:
    kinds: dict[str, tuple[str, int]] = {}
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield from (f"{file}:{number}: {problem}" for problem in _problems(line, number, needed, kinds))


def _problems(line: bytes, number: int, needed: tuple[str, ...], kinds: dict[str, tuple[str, int]]) -> Iterator[str]:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        yield "not text in UTF-8"
        return
    except json.JSONDecodeError as error:
        yield f"not JSON ({error.msg} at column {error.colno})"
        return
    if not isinstance(row, dict):
        yield f"{_kind(row)}, and no mapping of columns"
        return
    yield from (f"{column!r} is missing" for column in needed if _lacks(row, column))
    for column, value in row.items():
        kind, first = kinds.setdefault(column, (_kind(value), number)) if value is not None else ("", 0)
        if first and kind != _kind(value):
            yield f"{column!r} is {_kind(value)}, and {kind} in line {first}"


def _lacks(row: dict[str, Any], column: str) -> bool:
    """A dot leads into a mapping."""
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value is None


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "null")


def broken(argument: str, lines: Iterable[str]) -> str:
    """The refusal of these lines in the file that `argument` names, one line for each."""
    return "\n".join(
        f"{argument}: {line}; allowed: a JSON mapping with the same columns in each line" for line in lines
    )

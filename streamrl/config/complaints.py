"""What pydantic complains of, in the lines that the user reads: key, value, what is allowed, the nearest known key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from streamrl.config.keys import fields
from streamrl.config.other_names import our_key
from streamrl.config.tree import Config
from streamrl.config.words import allowed, as_text, section_in

DEEPEST = 8  # sections within one another, of another trainer
MOST = 100  # keys of one of its sections that are named each


def complaints(error: ValidationError) -> list[str]:
    """One line for each mistake, in the order of the tree."""
    lines = (line for each in error.errors() for line in _text(each).splitlines())
    return list(dict.fromkeys(lines))  # what may be of two types, and is of neither, is told twice


def _text(error: ErrorDetails) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "choice":  # its line begins with the key of its kind, which may be elsewhere in a list
        line, key = str(error["ctx"]["line"]), error["ctx"].get("key")
        return line if key is None else line.replace(key, path, 1)
    if error["type"] == "rule":  # between keys: its text names them, relative to its section
        return ".".join(filter(None, [path, str(error["ctx"]["line"])]))
    if error["type"] == "value_error":
        return "\n".join(".".join(filter(None, [path, line])) for line in str(error["ctx"]["error"]).splitlines())
    if error["type"] == "extra_forbidden":
        section, _ = _locate(error["loc"][:-1])
        known = ", ".join(section.model_fields)
        keys = _unknown_keys(path, error["input"], section)
        return "\n".join(_unknown(key, value, known) for key, value in keys)
    given = as_text(error["input"])
    section, field = _locate(error["loc"])
    if field is None:
        return f"{path}: {given} is not allowed; allowed: a mapping of {', '.join(section.model_fields)}"
    name = ".".join(str(part) for part in error["loc"][: _depth(error["loc"])])
    return f"{name}: {given} is not allowed ({field.description}); allowed: {allowed(field)}; nearest known key: {name}"


def _unknown(key: str, value: Any, known: str) -> str:
    nearest = nearest_key(key)
    hint = f"; nearest known key: {nearest}{_meaning(nearest)}" if nearest else ""
    return f"{key}: unknown key (given {as_text(value)}); allowed: {known}{hint}"


def _unknown_keys(path: str, value: Any, section: type[BaseModel]) -> Iterable[tuple[str, Any]]:
    """The key with its value; those in it, where it is another trainer's section, and no misspelt key of `section`."""
    inner = list(islice(_leaves(path, value), MOST + 1))
    is_misspelt = difflib.get_close_matches(path.rpartition(".")[2], section.model_fields)
    is_known = len(inner) <= MOST and any(our_key(key) for key, _ in inner)
    return inner if is_known and not is_misspelt else [(path, value)]


def _leaves(path: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The keys of a tree, which may have itself as a value."""
    if not isinstance(value, Mapping) or not value or depth == DEEPEST:
        yield path, value
        return
    for key, inner in value.items():
        yield from _leaves(f"{path}.{key}", inner, depth + 1)


def nearest_key(path: str) -> str | None:
    """The key that is meant: by what other trainers call it, by its last word, or by its spelling."""
    if (meant := our_key(path)) is not None:
        return meant
    known = [name for name, _ in fields()]
    first, *_, last = path.split(".") * 2
    same_leaf = [name for name in known if name.rpartition(".")[2] == last]
    own = [name for name in same_leaf if name.startswith(f"{first}.")]
    close = own or same_leaf or difflib.get_close_matches(path, known, n=1, cutoff=0.5)
    return close[0] if close else None


def _locate(loc: Sequence[int | str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The section and, unless `loc` is a section itself, the field that an error's place names."""
    section: type[BaseModel] = Config
    for part in loc:
        field = section.model_fields[str(part)]
        nested = section_in(field.annotation)
        if nested is None:
            return section, field
        section = nested
    return section, None


def _meaning(key: str) -> str:
    """What it is, in brackets: another trainer's key may have another unit. Nothing of a section."""
    _, field = _locate(key.split("."))
    return "" if field is None else f" ({field.description})"


def _depth(loc: Sequence[int | str]) -> int:
    """How many parts of `loc` name sections and their field (what follows is inside the field's value)."""
    section: type[BaseModel] = Config
    for depth, part in enumerate(loc):
        nested = section_in(section.model_fields[str(part)].annotation)
        if nested is None:
            return depth + 1
        section = nested
    return len(loc)

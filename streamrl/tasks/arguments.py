"""Task arguments: one pydantic model a task, and one line for whatever it refuses."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamrl.config.file import allowed

ARGUMENTS = "task.args"


class TaskArguments(BaseModel):
    """What every task takes; a task adds its own fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    held_out: float = Field(0.05, gt=0, lt=1, description="share of the prompts that only probes see")


Arguments = TypeVar("Arguments", bound=TaskArguments)


def parse_arguments(model: type[Arguments], values: Mapping[str, Any]) -> Arguments:
    """Check `task.args` against a task's model.

    Raises ValueError with one line: the key's path, the value, what is allowed, the nearest known key.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
    path = ".".join([ARGUMENTS, *(str(part) for part in first["loc"])])
    if first["type"] == "extra_forbidden":
        raise ValueError(unknown_key(path, first["input"], model.model_fields))
    if first["type"] == "value_error":  # a rule between keys: its text names them
        raise ValueError(f"{ARGUMENTS}.{first['ctx']['error']}")
    key = str(first["loc"][0])
    field = model.model_fields[key]
    given = "nothing" if first["type"] == "missing" else repr(first["input"])
    raise ValueError(
        f"{path}: {given} is not allowed ({field.description}); allowed: {allowed(field)}; "
        f"nearest known key: {ARGUMENTS}.{key}"
    )


def unknown_key(path: str, value: Any, known: Iterable[str]) -> str:
    """The line for a key that nobody knows."""
    section, _, key = path.rpartition(".")
    names = list(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"; nearest known key: {section}.{near[0]}" if near else ""
    return f"{path}: unknown key (given {value!r}); allowed: {', '.join(names)}{hint}"


def not_among(path: str, value: str, known: Iterable[str]) -> str:
    """The line for a value that is not one of the known words."""
    names = list(known)
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    hint = f"; nearest known value: {near[0]}" if near else ""
    return f"{path}: {value!r} is not allowed; allowed: one of {', '.join(names)}{hint}"

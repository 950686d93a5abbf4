"""Task arguments: one pydantic model a task, and one line for whatever it refuses."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from streamrl.choices import kind_in
from streamrl.config.words import checked

ARGUMENTS = "task.args"


# Gives a relative path its absolute place.
Place = Callable[[Path], Path]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Marks an argument whose text may name something on disk: the record of a run has it with an absolute path.

    Example: `reward: Annotated[str | None, OnDisk("code")]`. Arguments of type Path need no mark.
    """

    kind: Literal["folder", "data", "code"]  # a folder; files or a folder, or else a hub name; path/file.py:NAME

    def placed(self, text: str, place: Place) -> str:
        """The text with its path, if it has one, where `place` says.

        >>> OnDisk("code").placed("rewards.py:exact", lambda path: Path("/srv") / path)
        '/srv/rewards.py:exact'
        """
        where, separator, name = text.rpartition(":")
        match self.kind:
            case "code":
                return f"{place(Path(where))}:{name}" if separator and where.endswith(".py") else text
            case "data":
                is_path = "://" not in text and (Path(text).suffix in DATA_FORMATS or Path(text).exists())
                return str(place(Path(text))) if is_path else text
            case "folder":
                return str(place(Path(text)))


# Endings of data files, and what the datasets library calls their formats.
DATA_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


# Arguments of data sets of the hub, which a file has no use for.
OF_THE_HUB = ("revision", "subset", "split", "test_split")


def is_data_file(path: str) -> bool:
    """Whether `path` is a file, or several, and no data set with splits of its own."""
    return Path(path).suffix in DATA_FORMATS


class TaskArguments(BaseModel):
    """What every task takes; a task adds its own fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    held_out: float = Field(0.05, gt=0, lt=1, description="share of the prompts that only probes see")


Arguments = TypeVar("Arguments", bound=TaskArguments)


def parse_arguments(model: type[Arguments], values: Mapping[str, Any]) -> Arguments:
    """Check `task.args` against a task's model.

    Raises ConfigError with one line for each mistake: the key's path, the value, what is allowed, the nearest known
    key.
    """
    return checked(model, values, ARGUMENTS)


def placed(model: type[BaseModel], values: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Arguments or options with absolute paths, as a configuration would have them; others are left as they are."""
    found = dict(values)
    for key, field in model.model_fields.items():
        match found.get(key):
            case str(text):
                found[key] = _on_disk(field.annotation, field.metadata, text, place)
            case [*items] if get_origin(field.annotation) is tuple:
                each = get_args(field.annotation)[0]
                found[key] = [_on_disk(each, (), item, place) if isinstance(item, str) else item for item in items]
    return found


def _on_disk(annotation: Any, metadata: Iterable[Any], text: str, place: Place) -> str:
    """One argument, with an absolute path where its type, or a mark on it, says that it may name one."""
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
    marks = [mark for mark in metadata if isinstance(mark, OnDisk)]
    if annotation in (Path, Path | None):
        marks.append(OnDisk("folder"))
    if kind_in(metadata) is not None:
        marks.append(OnDisk("code"))
    for mark in marks:
        text = mark.placed(text, place)
    return text


def not_among(path: str, value: str, known: Iterable[str]) -> str:
    """The line for a value that is not one of the known words."""
    names = list(known)
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    hint = f"; nearest known value: {near[0]}" if near else ""
    return f"{path}: {value!r} is not allowed; allowed: one of {', '.join(names)}{hint}"

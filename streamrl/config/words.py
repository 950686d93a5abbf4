"""What a key accepts, and why a value is refused, in words."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from streamrl.choices import kind_in
from streamrl.config.refused import ConfigError

_WORDS = {
    int: "whole number", float: "number", bool: "true or false", str: "text", Path: "path", dict: "a mapping",
    type(None): "null",
}  # fmt: skip

Model = TypeVar("Model", bound=BaseModel)


def allowed(field: FieldInfo) -> str:
    """What a field accepts, in words: `whole number >= 1`, `one of fifo, windowed`."""
    if kind := kind_in(field.metadata):
        return kind.allowed
    text = _type_words(field.annotation)
    bounds = [
        f"{sign} {bound:.10g}"
        for item in field.metadata
        for kind, name, sign in ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))
        if isinstance(item, kind) and isinstance(bound := getattr(item, name), int | float)
    ]
    bounds += [f"matching {pattern}" for item in field.metadata if (pattern := getattr(item, "pattern", None))]
    return " ".join([text, " and ".join(bounds)]).strip()


def checked(model: type[Model], values: Mapping[str, Any], where: str) -> Model:
    """Values below the key `where`, as a model.

    Raises ConfigError with one line for each mistake: the key's path, the value, what is allowed, the nearest known
    key.
    """
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_refused(model, each, where) for each in error.errors()))) from None


def _refused(model: type[BaseModel], error: ErrorDetails, where: str) -> str:
    path = ".".join([where, *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        return unknown_key(path, error["input"], model.model_fields)
    if error["type"] == "choice":
        return str(error["ctx"]["line"])
    if error["type"] == "value_error":  # a rule between keys: its text names them
        return f"{where}.{error['ctx']['error']}"
    key = str(error["loc"][0])
    field = model.model_fields[key]
    given = "nothing" if error["type"] == "missing" else repr(error["input"])
    return (
        f"{path}: {given} is not allowed ({field.description}); allowed: {allowed(field)}; "
        f"nearest known key: {where}.{key}"
    )


def unknown_key(path: str, value: Any, known: Iterable[str]) -> str:
    """The line for a key that nobody knows."""
    section, _, key = path.rpartition(".")
    names = list(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    hint = f"; nearest known key: {section}.{near[0]}" if near else ""
    return f"{path}: unknown key (given {value!r}); allowed: {', '.join(names) or 'none'}{hint}"


def section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation names, None for a plain value."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _type_words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        words = ", ".join(as_text(value) for value in arguments)
        return words if len(arguments) == 1 else f"one of {words}"
    if origin is Annotated:  # by a field that describes what it takes
        return str(arguments[1].description)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_words(part) for part in arguments)
    if origin is tuple:
        return f"a list of {_type_words(arguments[0])}"
    if nested := section_in(annotation):
        return f"mappings of {', '.join(nested.model_fields)}"
    return _WORDS[origin or annotation]


def as_text(value: Any) -> str:
    """A value as it is written in YAML, on one line."""
    if isinstance(value, Path | str):
        text = str(value)
        return text if text.splitlines() == [text] else repr(text)
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()

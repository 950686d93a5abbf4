"""A configuration as YAML in which each line has its comment, from the descriptions of the configuration tree."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from streamrl.config import Config
from streamrl.config.words import section_in
from streamrl.config.yaml_text import Writer
from streamrl.tasks.environment import Environment

WIDTH = 110  # columns: a comment that would be longer is written above its key


@dataclass(frozen=True, slots=True)
class _Line:
    text: str  # with its indent; empty: a line between two groups
    comment: str = ""


def commented(values: Mapping[str, Any], task: type[Environment]) -> str:
    """The YAML of `values`, by dotted path and in the order of the tree; a group and a heading for each section.

    `task.args` is followed by the further arguments that the task's starter shows, behind a `#`.
    """
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        within = tree
        for name in sections:
            within = within.setdefault(name, {})
        within[key] = value
    groups = [list(_group(name, tree[name], task)) for name in Config.model_fields if name in tree]
    return "\n".join("".join(_written(group)) for group in groups)


def _group(name: str, values: Mapping[str, Any], task: type[Environment]) -> Iterator[_Line]:
    section = section_in(Config.model_fields[name].annotation)
    assert section is not None
    yield _Line(f"# {heading(section)}")
    yield _Line(f"{name}:")
    yield from _keys(section, values, "  ", task)


def _keys(section: type[BaseModel], values: Mapping[str, Any], indent: str, task: type[Environment]) -> Iterator[_Line]:
    for key, field in section.model_fields.items():
        if key not in values:
            continue
        nested = section_in(field.annotation)
        if nested is not None:
            yield _Line(f"{indent}{key}:", field.description or "")
            yield from _keys(nested, values[key], f"{indent}  ", task)
        elif key == "args":
            yield _Line(f"{indent}{key}:" if values[key] else f"{indent}{key}: {{}}", field.description or "")
            yield from _arguments(values[key], f"{indent}  ", task)
        else:
            yield _Line(f"{indent}{key}: {_flow(values[key])}", field.description or "")


def _arguments(given: Mapping[str, Any], indent: str, task: type[Environment]) -> Iterator[_Line]:
    """Those that are given, then, each in a comment, those that the starter shows."""
    fields, shown = task.Arguments.model_fields, task.starter.shown
    for key, value in given.items():
        yield _Line(f"{indent}{key}: {_flow(value)}", fields[key].description or "")
    for key, field in fields.items():
        if key not in given and (shown is None or key in shown or key in task.defaults):
            yield _Line(f"{indent}# {key}: {_flow(_default(key, field, task))}", field.description or "")


def _default(key: str, field: FieldInfo, task: type[Environment]) -> Any:
    default = field.get_default(call_default_factory=True, validated_data={})
    value = task.defaults.get(key, default)
    return "" if value is PydanticUndefined else list(value) if isinstance(value, tuple) else value


def _written(lines: Iterable[_Line]) -> Iterator[str]:
    """The comments of a group are in one column, where there is room for them."""
    lines = list(lines)
    column = max(len(line.text) for line in lines if line.comment and _fits(line)) + 2 if any(map(_fits, lines)) else 0
    for line in lines:
        if not line.comment:
            yield f"{line.text}\n"
        elif _fits(line) and column + len(line.comment) + 2 <= WIDTH:
            yield f"{line.text:{column}}# {line.comment}\n"
        else:
            indent = " " * (len(line.text) - len(line.text.lstrip()))
            yield f"{indent}# {line.comment}\n{line.text}\n"


def _fits(line: _Line) -> bool:
    return bool(line.comment) and len(line.text) + len(line.comment) + 4 <= WIDTH


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.dump(value, Dumper=Writer, default_flow_style=True, width=10_000, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("...\n").strip()
    return json.dumps(value, ensure_ascii=False) if "\n" in text else text


def heading(kind: type) -> str:
    """The first paragraph of what a class says of itself, on one line."""
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())

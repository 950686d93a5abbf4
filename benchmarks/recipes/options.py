"""Options as the sources write them: flags, overrides and the defaults of both, each with its line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from benchmarks.recipes.shell import Text, plain


@dataclass(frozen=True)
class Option:
    """One option and where its value is written."""

    name: str
    value: Any
    path: str
    line: int


def scalar(text: str) -> Any:
    """A value as it is meant: true, false, null, a number, or the text itself."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def overrides(words: Iterable[Text]) -> dict[str, Option]:
    """The `key=value` words of a command; a later one wins. A value's place is that of its last character."""
    found = {}
    for word in words:
        key, equals, value = plain(word).partition("=")
        if equals and re.fullmatch(r"\+{0,2}[a-z]\w*(\.\w+)+", key):
            place = word[-1]
            found[key.lstrip("+")] = Option(key.lstrip("+"), scalar(value), place.path, place.line)
    return found


def flags(words: list[Text]) -> dict[str, Option]:
    """The `--flag value` words of a command; a flag without a value is true, a later one wins."""
    found = {}
    for word, after in zip(words, [*words[1:], []], strict=True):
        if not plain(word).startswith("--"):
            continue
        name, equals, own = plain(word).partition("=")
        has_value = bool(after) and not plain(after).startswith("--")
        place = (after if has_value and not equals else word)[-1]
        value = scalar(own) if equals else scalar(plain(after)) if has_value else True
        found[name] = Option(name, value, place.path, place.line)
    return found


def yaml_defaults(text: str, path: str) -> dict[str, Option]:
    """The leaves of a YAML file by their dotted names. `${...}` and `???`, filled in from elsewhere, are left out."""
    return {option.name: option for option in _leaves(yaml.compose(text), (), path)}


def _leaves(node: yaml.Node | None, names: tuple[str, ...], path: str) -> Iterator[Option]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _leaves(value, (*names, str(key.value)), path)
    elif isinstance(node, yaml.SequenceNode) and all(isinstance(each, yaml.ScalarNode) for each in node.value):
        values = [scalar(each.value) for each in node.value]
        yield Option(".".join(names), values, path, node.start_mark.line + 1)
    elif isinstance(node, yaml.ScalarNode) and not re.match(r"\$\{|\?\?\?", node.value):
        yield Option(".".join(names), scalar(node.value), path, node.start_mark.line + 1)


def python_defaults(text: str, path: str) -> dict[str, Option]:
    """The defaults that a Python file gives to flags: by `add_argument`, or by the fields of a class."""
    found = {}
    for node in ast.walk(ast.parse(text)):
        for name, value in _default(node):
            if isinstance(value, ast.Constant):
                found[name] = Option(name, value.value, path, value.lineno)
    return found


def _default(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Call(ast.Attribute(_, "add_argument"), [ast.Constant(str(name)), *_], keywords):
            given = {keyword.arg: keyword.value for keyword in keywords}
            switch = isinstance(kind := given.get("action"), ast.Constant) and kind.value == "store_true"
            absent = ast.Constant(False, lineno=node.lineno) if switch else ast.Constant(None, lineno=node.lineno)
            yield name, given.get("default", absent)
        case ast.ClassDef(body=body):
            for line in body:
                match line:
                    case ast.AnnAssign(ast.Name(name), value=ast.Call(ast.Name("field"), _, keywords)):
                        for keyword in keywords:
                            if keyword.arg == "default":
                                yield f"--{name.replace('_', '-')}", keyword.value
                    case ast.AnnAssign(ast.Name(name), value=ast.expr() as value):
                        yield f"--{name.replace('_', '-')}", value

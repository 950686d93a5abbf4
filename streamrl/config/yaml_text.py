"""YAML with the scalars of version 1.2, and the line on which each of its keys is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from streamrl.config.refused import ConfigError


@dataclass(frozen=True, slots=True)
class Line:
    """Where a key is. Example: `Line(12, is_mapping=False)` of `steps: 3` on the twelfth line."""

    number: int  # from 1
    is_mapping: bool  # its value has keys of its own


class Yaml(yaml.SafeLoader):
    """`off`, `2026-01-31` and `1:30` are words, `1e-6` is a number, `010` is ten, no key occurs twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node))
        return int(text, 0 if text.startswith(("0o", "0x")) else 10)


Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Yaml.add_constructor("tag:yaml.org,2002:int", Yaml.construct_yaml_int)
Yaml.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"([-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


class Writer(yaml.SafeDumper):
    """Quotes the texts that `Yaml` would read as something else."""

    yaml_implicit_resolvers = Yaml.yaml_implicit_resolvers


def parse_yaml(text: str, where: Path | str) -> Any:
    """The value of a YAML text. Raises ConfigError, which names `where` it is: a file, with its line, or a key."""
    return parse_with_lines(text, where)[0]


def parse_with_lines(text: str, where: Path | str) -> tuple[Any, dict[str, Line]]:
    """The value, and the line of each key by its dotted path: `generate.attach.0`. Raises as `parse_yaml` does."""
    try:
        loader = Yaml(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        return loader.construct_document(node), dict(_lines(node))
    except (yaml.YAMLError, ValueError) as error:  # the latter for a number that is none
        raise ConfigError(f"{_place(where, error)}: not YAML: {_reason(error)}; allowed: YAML") from None


def _lines(node: yaml.Node, path: str = "", above: tuple[yaml.Node, ...] = ()) -> Iterator[tuple[str, Line]]:
    if node in above:  # by an alias, itself
        return
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(str(place), value, value) for place, value in enumerate(node.value)]
    else:
        return
    for name, begin, value in children:
        yield f"{path}{name}", Line(begin.start_mark.line + 1, isinstance(value, yaml.MappingNode))
        yield from _lines(value, f"{path}{name}.", (*above, node))


def _place(where: Path | str, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{where}:{mark.line + 1}" if isinstance(where, Path) and mark is not None else str(where)


def _reason(error: Exception) -> str:
    """What is wrong, on one line and without its place."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    return " ".join(" ".join(filter(None, (error.context, error.problem))).split())

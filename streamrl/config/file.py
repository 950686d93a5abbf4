"""Reading a configuration: YAML and `key=value` overrides in, a checked `Config` out, or one clear line.

>>> load(None, ["replay.max_staleness=0"]).replay.slots
8

A file may stand on others: `base: models/qwen3-8b.yaml`, or a list of such, relative to the file itself. Later ones
win over earlier ones and the file over all of them; mappings are merged key by key, any other value is replaced.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from streamrl.config import Config
from streamrl.config.words import allowed, as_text, section_in

BASE = "base"  # the key of a file that names the files below it; it is no key of the tree


class ConfigError(ValueError):
    """A configuration that is refused; its text is the one line that the user reads."""


class _Yaml(yaml.SafeLoader):
    """YAML with the scalars of version 1.2: `off` and `no` are words, `1e-6` is a number, no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":bool", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Yaml.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"),
    list("-+.0123456789"),
)


class _Writer(yaml.SafeDumper):
    """Quotes the texts that `_Yaml` would read as something else."""

    yaml_implicit_resolvers = _Yaml.yaml_implicit_resolvers


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read the YAML file at `path` (None: the defaults) and its bases, apply `key=value` overrides in order, check.

    Raises ConfigError with one line that names the key's path, the value, what is allowed and the
    nearest known key.
    """
    tree = {} if path is None else _read(path)
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"{override!r} is not an override; allowed: key=value, such as replay.max_staleness=0")
        _set(tree, key, parse_yaml(text, where=key))
    return checked(tree)


def checked(tree: dict[str, Any]) -> Config:
    """The configuration of a tree of keys and values. Raises ConfigError with one line, as `load` does."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_one_line(error.errors()[0])) from None


def save(config: Config, path: Path) -> None:
    """Write every key of `config` to `path`, so that `load(path)` gives it back."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(yaml.dump(config.model_dump(mode="json"), Dumper=_Writer, sort_keys=False))
    os.replace(draft, path)


def fields(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the tree with its dotted path, in the order of the tree; sections themselves are left out."""
    for name, field in section.model_fields.items():
        if nested := section_in(field.annotation):
            yield from fields(nested, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def describe() -> str:
    """The reference of all keys: path, what is allowed, default, meaning."""
    lines = []
    for path, field in fields():
        default = field.get_default(call_default_factory=True, validated_data={})
        lines.append(f"  {path}={as_text(default)}\n      {field.description} [{allowed(field)}]")
    return "\n".join(lines)


def changed(old: Config, new: Config) -> list[str]:
    """The dotted paths whose values differ between two configurations."""
    return [path for path, _ in fields() if value_at(old, path) != value_at(new, path)]


def value_at(config: Config, path: str) -> Any:
    """The value at a dotted path."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text, with the scalars of version 1.2. Raises ConfigError, which names `where` it stands."""
    try:
        return yaml.load(text, _Yaml)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not YAML: {' '.join(str(error).split())}; allowed: YAML") from None


def _read(path: Path, standing_on_it: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tree of a file over those of its bases."""
    if path.resolve() in standing_on_it:
        raise ConfigError(f"{path}: base: {path} stands on itself; allowed: bases without a circle")
    tree = _read_alone(path)
    bases = tree.pop(BASE, [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: base: {as_text(bases)} is not allowed; allowed: a file, or a list of files")
    below: dict[str, Any] = {}
    for base in bases:
        below = _over(below, _read(path.parent / base, (*standing_on_it, path.resolve())))
    return _over(below, tree)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`: mappings key by key, other values whole."""
    merged = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _over(below[key], above[key])
    return merged


def _read_alone(path: Path) -> dict[str, Any]:
    try:
        tree = parse_yaml(path.read_text(), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{path}: {reason}; allowed: a YAML file, such as configs/quickstart.yaml") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {as_text(tree)}; allowed: a mapping of {', '.join(Config.model_fields)}")
    return tree


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for depth, name in enumerate(parents):
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            path = ".".join(parents[: depth + 1])
            raise ConfigError(f"{key}: {path} is {as_text(child)} and has no keys; allowed: {path}=VALUE")
        tree = child
    tree[last] = value


def _one_line(error: ErrorDetails) -> str:
    """The first complaint of pydantic, as the line that the user reads."""
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "choice":  # its line begins with the key of its kind, which may be elsewhere in a list
        line, key = str(error["ctx"]["line"]), error["ctx"].get("key")
        return line if key is None else line.replace(key, path, 1)
    if error["type"] == "value_error":  # a rule between keys: its text names them, relative to its section
        return ".".join(filter(None, [path, str(error["ctx"]["error"])]))
    given = as_text(error["input"])
    if error["type"] == "extra_forbidden":
        section, _ = _locate(error["loc"][:-1])
        nearest = _nearest(path)
        hint = f"; nearest known key: {nearest}" if nearest else ""
        return f"{path}: unknown key (given {given}); allowed: {', '.join(section.model_fields)}{hint}"
    section, field = _locate(error["loc"])
    if field is None:
        return f"{path}: {given} is not allowed; allowed: a mapping of {', '.join(section.model_fields)}"
    name = ".".join(str(part) for part in error["loc"][: _depth(error["loc"])])
    return f"{name}: {given} is not allowed ({field.description}); allowed: {allowed(field)}; nearest known key: {name}"


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


def _depth(loc: Sequence[int | str]) -> int:
    """How many parts of `loc` name sections and their field (what follows is inside the field's value)."""
    section: type[BaseModel] = Config
    for depth, part in enumerate(loc):
        nested = section_in(section.model_fields[str(part)].annotation)
        if nested is None:
            return depth + 1
        section = nested
    return len(loc)


def _nearest(path: str) -> str | None:
    known = [name for name, _ in fields()]
    leaf = path.rpartition(".")[2]
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    close = same_leaf or difflib.get_close_matches(path, known, n=1, cutoff=0.5)
    return close[0] if close else None

"""Reading a configuration: YAML and `key=value` overrides in, a checked `Config` out, or one line for each mistake.

>>> load(None, ["replay.max_staleness=0"]).replay.slots
8

A file may build on others: `base: models/qwen3-8b.yaml`, or a list of such, relative to the file itself. Later ones
win over earlier ones and the file over all of them; mappings are merged key by key, any other value is replaced.

    YAML, key=value ──▶ each key, each value, rules within a section ──▶ rules between sections ──▶ Config

What is refused in one of these stages is told at once; what comes behind it would be a consequence of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from streamrl.config import Config
from streamrl.config.complaints import complaints
from streamrl.config.generate import KEY_ARGUMENTS
from streamrl.config.keys import fields
from streamrl.config.positions import Positions
from streamrl.config.refused import ConfigError, Refusals
from streamrl.config.schema import FIRST_LINE, write_beside
from streamrl.config.words import allowed, as_text
from streamrl.config.yaml_text import Line, Writer, parse_with_lines, parse_yaml
from streamrl.whole_files import drafted

__all__ = [
    "ConfigError", "as_tree", "as_yaml", "changed", "checked", "describe", "fields", "load", "located", "parse_yaml",
    "save", "shareable", "value_at",
]  # fmt: skip

BASE = "base"  # the key of a file that names the files below it; it is no key of the tree


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read the YAML file at `path` (None: the defaults) and its bases, apply `key=value` overrides in order, check.

    Raises ConfigError with one line for each mistake: where it is, the key's path, the value, what is allowed and the
    nearest known key.
    """
    tree, positions = _given(path, overrides)
    try:
        return checked(tree)
    except ConfigError as error:
        raise ConfigError("\n".join(map(positions.located, error.lines))) from None


def located(lines: Sequence[str], path: Path | None, overrides: Sequence[str]) -> list[str]:
    """Lines of a later refusal, with the place of the key that each begins with: FILE:LINE, or behind the command."""
    try:
        _, positions = _given(path, overrides)
    except ConfigError:
        return list(lines)
    return list(map(positions.located, lines))


def checked(tree: dict[str, Any]) -> Config:
    """The configuration of a tree of keys and values. Raises ConfigError, as `load` does but without places."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(complaints(error))) from None


def save(config: Config, path: Path) -> None:
    """Write every key of `config` to `path`, so that `load(path)` gives it back; beside it the schema, for editors."""
    with drafted(path) as draft:
        draft.write_text(FIRST_LINE + as_yaml(as_tree(config)))
        write_beside(path)


def as_yaml(tree: Mapping[str, Any]) -> str:
    """The keys of `as_tree` or `shareable`, for a file that has no schema beside it."""
    return yaml.dump(tree, Dumper=Writer, sort_keys=False)


def as_tree(config: Config) -> dict[str, Any]:
    """Every key of `config`, so that `checked` gives it back: beside `run.epochs`, `run.steps` is null."""
    tree = config.model_dump(mode="json")
    if config.run.epochs is not None:
        tree["run"]["steps"] = None
    return tree


def shareable(config: Config) -> dict[str, Any]:
    """Every key of `config`, for others to read: `server_args` without the keys of the servers."""
    tree = config.model_dump(mode="json")
    for pool in (tree["generate"], *tree["generate"]["pools"]):
        if "server_args" in pool:
            given = pool["server_args"].items()
            pool["server_args"] = {name: value for name, value in given if name.replace("-", "_") not in KEY_ARGUMENTS}
    return tree


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


def _given(path: Path | None, overrides: Sequence[str]) -> tuple[dict[str, Any], Positions]:
    """The tree of a file and the overrides, and where each of its keys was given."""
    positions = Positions()
    tree = {} if path is None else _read(path, positions)
    refusals = Refusals()
    for override in overrides:
        with refusals:
            key, value = _parsed(override)
            _set(tree, key, value)
            positions.add_override(key, value)
    refusals.tell()
    return tree, positions


def _parsed(override: str) -> tuple[str, Any]:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"{override!r} is not an override; allowed: key=value, such as replay.max_staleness=0")
    return key, parse_yaml(text, where=f"override {key}")


def _read(path: Path, positions: Positions, standing_on_it: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tree of a file over those of its bases."""
    if path.resolve() in standing_on_it:
        raise ConfigError(f"{path}: base: {path} builds on itself; allowed: bases without a circle")
    tree, lines = _read_alone(path)
    bases = tree.pop(BASE, [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        where = f"{path}:{lines[BASE].number}"
        raise ConfigError(f"{where}: base: {as_text(bases)} is not allowed; allowed: a file, or a list of files")
    below: dict[str, Any] = {}
    for base in bases:
        below = _over(below, _read(path.parent / base, positions, (*standing_on_it, path.resolve())))
    positions.add_file(path, lines)
    return _over(below, tree)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`: mappings key by key, other values whole."""
    merged = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _over(below[key], above[key])
    return merged


def _read_alone(path: Path) -> tuple[dict[str, Any], dict[str, Line]]:
    try:
        tree, lines = parse_with_lines(path.read_text(), where=path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"{path}: {reason}; allowed: a YAML file, such as configs/quickstart.yaml") from None
    if tree is None:
        return {}, {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {as_text(tree)}; allowed: a mapping of {', '.join(Config.model_fields)}")
    return tree, lines


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for depth, name in enumerate(parents):
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            path = ".".join(parents[: depth + 1])
            raise ConfigError(f"override {key}: {path} is {as_text(child)} and has no keys; allowed: {path}=VALUE")
        tree = child
    tree[last] = value

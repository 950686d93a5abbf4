"""A rule: which of a script's options make one key of streamrl's configuration, and how."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.recipes.options import Option


class RuleError(ValueError):
    """A script says what no rule has a key for; one line with its place."""


class Unsaid:
    """What a rule answers where the script says nothing about the key."""


UNSAID = Unsaid()


def same(value: Any) -> Any:
    """The value as it is; null says nothing."""
    return UNSAID if value is None else value


@dataclass(frozen=True)
class Rule:
    """`key` is `convert(values of options)`; it applies where every option has a value or a default."""

    key: str
    options: tuple[str, ...]
    convert: Callable[..., Any] = same


@dataclass(frozen=True)
class Constant:
    """`key` is a figure of the source's code, which no option changes: the first group of `pattern` in `path`."""

    key: str
    path: str
    pattern: str
    convert: Callable[[str], Any] = float


@dataclass(frozen=True)
class Fact:
    """The value of a key, and where a source says so."""

    key: str
    value: Any
    path: str
    line: int
    option: str


@dataclass(frozen=True)
class Language:
    """Everything about the options of one source."""

    rules: tuple[Rule, ...]
    constants: tuple[Constant, ...]
    required: Mapping[str, tuple[Any, ...]]  # option: the values that streamrl has a counterpart for
    without_key: Mapping[str, str]  # pattern of options: why they have no key


def facts(language: Language, given: Mapping[str, Option], defaults: Mapping[str, Option]) -> list[Fact]:
    """What the options `given` by a script, and `defaults` for the others, make of streamrl's keys.

    Raises RuleError for an option that no rule reads and `without_key` does not name, and for a value without a
    counterpart.
    """
    known = {**defaults, **given}
    _check(language, given, known)
    found = []
    for rule in language.rules:
        options = [known.get(name) for name in rule.options]
        if any(option is None for option in options):
            continue
        value = rule.convert(*(option.value for option in options if option is not None))
        if value is not UNSAID:
            said = [option for option in options if option is not None]
            place = next((option for option in said if option.name in given), said[0])
            found.append(Fact(rule.key, value, place.path, place.line, " ".join(rule.options)))
    return found


def constants(language: Language, files: Callable[[str], str | None]) -> Iterator[Fact]:
    """The figures of the source's code. Raises RuleError where the code reads otherwise now."""
    for constant in language.constants:
        text = files(constant.path) or ""
        if (found := re.search(constant.pattern, text, re.DOTALL)) is None:
            raise RuleError(f"{constant.path}: {constant.pattern!r} is not found, for {constant.key}")
        line = text.count("\n", 0, found.start(1)) + 1
        yield Fact(constant.key, constant.convert(found[1]), constant.path, line, found[1])


def _check(language: Language, given: Mapping[str, Option], known: Mapping[str, Option]) -> None:
    read = {name for rule in language.rules for name in rule.options} | language.required.keys()
    for option in given.values():
        if option.name not in read and not _matches(option.name, language.without_key):
            raise RuleError(f"{option.path}:{option.line}: {option.name} has no rule and no reason to have none")
    for name, allowed in language.required.items():
        found = known.get(name)
        if found is not None and found.value not in allowed:
            raise RuleError(f"{found.path}:{found.line}: {name}={found.value} has no counterpart; allowed: {allowed}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)

"""Numbers on the command line: what each kind of flag may be, and one line for whatever it may not."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

N = TypeVar("N", int, float)


def count(text: str) -> int:
    """A whole number above 0."""
    return _number(text, int, lambda value: value >= 1, "a whole number above 0")


def index(text: str) -> int:
    """A whole number from 0 on."""
    return _number(text, int, lambda value: value >= 0, "a whole number from 0 on")


def port(text: str) -> int:
    """A TCP port; 0 is a free one."""
    return _number(text, int, lambda value: 0 <= value <= 65535, "0 (a free port) to 65535")


def seconds(text: str) -> float:
    """A time above 0."""
    return _number(text, float, lambda value: 0 < value < math.inf, "a number above 0")


def limit(text: str) -> float:
    """A number from 0 on."""
    return _number(text, float, lambda value: 0 <= value < math.inf, "a number from 0 on")


def share(text: str) -> float:
    """A number from 0 to 1."""
    return _number(text, float, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _number(text: str, kind: Callable[[str], N], fits: Callable[[N], bool], allowed: str) -> N:
    """Raises ArgumentTypeError, of which the parser makes the line that the user reads."""
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not fits(value):
        raise ArgumentTypeError(f"{text} is not allowed; allowed: {allowed}")
    return value

"""Arithmetic of a model's text, evaluated exactly and without running it: for countdown, and as the tool `calculator`.

>>> evaluate("(1 + 2) / 6").value
Fraction(1, 2)
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

LONGEST = 256  # characters of an expression: it bounds the depth of the tree
LARGEST = 10**30  # magnitude of any number of the tool's, and of its denominator
POWER = 64  # largest exponent
DIGITS = 12  # of a fraction that the tool writes

# What models write for the signs of a keyboard.
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-"})

# No letter and no underscore: neither names nor calls nor numbers such as 1e999 can be written.
_CHARACTERS = frozenset("0123456789.+-*/() \t")

_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What an expression is worth, and the numbers in it, from left to right."""

    value: Fraction
    numbers: tuple[Fraction, ...]


@dataclass(frozen=True, slots=True)
class _Language:
    """What an expression may hold."""

    operators: dict[type[ast.operator], Callable[[Any, Any], Any]]
    allowed: str  # the same in words
    largest: int | None = None  # magnitude of any number, and of its denominator; None: LONGEST bounds the digits


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > POWER:
        raise ValueError(f"an exponent is a whole number up to {POWER}")
    return Fraction(base ** int(exponent))


_FOUR = _Language(
    {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv},
    "numbers, + - * / and parentheses",
)
_ALL = _Language(
    _FOUR.operators | {ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: _power},
    "numbers, + - * / // % ** and parentheses",
    LARGEST,
)


def evaluate(text: str) -> Arithmetic:
    """The value of `text`: numbers, + - * / and parentheses.

    Raises ValueError, with one line, for whatever else it holds, for a division by zero, and beyond LONGEST.
    """
    expression = text.strip().translate(_SIGNS)
    if not _CHARACTERS.issuperset(expression):
        raise ValueError(f"{expression[:40]!r} is no arithmetic; allowed: {_FOUR.allowed}")
    return _evaluated(expression, _FOUR)


def calculate(text: str) -> str:
    """The value of + - * / // % ** (or ^) and parentheses over decimal numbers, exactly; a fraction to DIGITS digits.

    >>> calculate("2 * (3 + 4) ** 2")
    '98'

    Raises ValueError for anything else, for division by zero, and beyond LONGEST, LARGEST and POWER.
    """
    value = _evaluated(text.strip().translate(_SIGNS).replace("^", "**"), _ALL).value
    return str(value) if value.denominator == 1 else f"{float(value):.{DIGITS}g}"


def _evaluated(expression: str, language: _Language) -> Arithmetic:
    if len(expression) > LONGEST:
        raise ValueError(f"{len(expression)} characters; allowed: up to {LONGEST}")
    numbers: list[Fraction] = []
    try:
        value = _value(ast.parse(expression, mode="eval").body, language, expression, numbers)
    except (SyntaxError, MemoryError, RecursionError):  # the last two: Python's words for nesting too deep
        raise ValueError(f"{expression[:40]!r} is no arithmetic; allowed: {language.allowed}") from None
    except ZeroDivisionError:
        raise ValueError(f"{expression[:40]!r} divides by zero") from None
    return Arithmetic(value, tuple(numbers))


def _value(node: ast.expr, language: _Language, expression: str, numbers: list[Fraction]) -> Fraction:
    """The value of a part; the numbers in it are added to `numbers`."""
    match node:
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in language.operators:
            first = _value(left, language, expression, numbers)
            second = _value(right, language, expression, numbers)
            return _checked(Fraction(language.operators[type(sign)](first, second)), language)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand, language, expression, numbers))
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            written = ast.get_source_segment(expression, node) or ""
            numbers.append(_checked(_number(written, number), language))
            return numbers[-1]
    raise ValueError(f"{type(node).__name__} is no arithmetic; allowed: {language.allowed}")


def _number(written: str, number: int | float) -> Fraction:
    """A number as it is written, without rounding; one with an exponent as the float that it is."""
    if _CHARACTERS.issuperset(written):
        return Fraction(written)
    if not math.isfinite(number):
        raise ValueError("the number is too large")
    return Fraction(str(number))


def _checked(number: Fraction, language: _Language) -> Fraction:
    largest = language.largest
    if largest is not None and (abs(number) > largest or number.denominator > largest):
        raise ValueError("the number is too large")
    return number

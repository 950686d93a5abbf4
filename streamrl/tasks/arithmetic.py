"""Arithmetic of a model's text, evaluated exactly and without running it.

>>> evaluate("(1 + 2) / 6").value
Fraction(1, 2)
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 256
# Characters of an expression: it bounds the depth of the tree, and the digits of any result.

_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-"})
# What models write for the signs of a keyboard.

_CHARACTERS = frozenset("0123456789.+-*/() \t")
# No letter and no underscore: neither names nor calls nor numbers such as 1e999 can be written.

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What an expression is worth, and the numbers that stand in it, from left to right."""

    value: Fraction
    numbers: tuple[Fraction, ...]


def evaluate(text: str) -> Arithmetic:
    """The value of `text`: numbers, + - * / and parentheses.

    Raises ValueError, with one line, for whatever else it holds, for a division by zero, and beyond LONGEST.
    """
    expression = text.strip().translate(_SIGNS)
    if len(expression) > LONGEST:
        raise ValueError(f"{len(expression)} characters; allowed: up to {LONGEST}")
    if not expression or not _CHARACTERS.issuperset(expression):
        raise ValueError(f"{expression[:40]!r} is no arithmetic; allowed: numbers, + - * / and parentheses")
    numbers: list[Fraction] = []
    try:
        value = _value(ast.parse(expression, mode="eval").body, expression, numbers)
    except (SyntaxError, MemoryError, RecursionError):  # the last two: Python's words for nesting too deep
        raise ValueError(f"{expression[:40]!r} is no arithmetic; allowed: numbers, + - * / and parentheses") from None
    except ZeroDivisionError:
        raise ValueError(f"{expression[:40]!r} divides by zero") from None
    return Arithmetic(value, tuple(numbers))


def _value(node: ast.expr, expression: str, numbers: list[Fraction]) -> Fraction:
    match node:
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _BINARY:
            first = _value(left, expression, numbers)
            return _BINARY[type(sign)](first, _value(right, expression, numbers))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand, expression, numbers))
        case ast.Constant(value=int() | float()):
            numbers.append(Fraction(ast.get_source_segment(expression, node) or ""))  # as written: no rounding
            return numbers[-1]
    raise ValueError(f"{type(node).__name__} is no arithmetic; allowed: numbers, + - * / and parentheses")

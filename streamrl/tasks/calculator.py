"""The tool `calculator`: arithmetic of numbers, read by a parser of its own small language, never evaluated as code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

LONGEST = 200  # characters of an expression
LARGEST = 10**30  # magnitude of any number in between
POWER = 64  # largest exponent

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class CalculationError(ValueError):
    """An expression that is not calculated; its text says why."""


def calculate(expression: str) -> str:
    """The value of + - * / // % ** and parentheses over decimal numbers, exactly; a fraction to twelve digits.

    >>> calculate("2 * (3 + 4) ** 2")
    '98'

    Raises CalculationError for anything else, for division by zero, and beyond LONGEST, LARGEST and POWER.
    """
    if len(expression) > LONGEST:
        raise CalculationError(f"an expression has at most {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        return _text(_value(tree.body))
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        reason = str(error) if isinstance(error, CalculationError) else "not an expression of numbers"
        raise CalculationError(reason) from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _BINARY:
            return _bounded(Fraction(_BINARY[type(operation)](_value(left), _value(right))))
    raise CalculationError("only numbers, + - * / // % ** and parentheses")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > POWER:
        raise CalculationError(f"an exponent is a whole number up to {POWER}")
    return _bounded(base ** int(exponent))


def _bounded(number: Fraction) -> Fraction:
    if abs(number) > LARGEST or number.denominator > LARGEST:
        raise CalculationError("the number is too large")
    return number


def _text(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else f"{float(number):.12g}"

"""Types as they are written in the source of a dataclass, against values of YAML. Pure: nothing of it is imported.

>>> optional = ast.parse("Optional[Literal['fp32', 'fp64']]", mode="eval").body
>>> fits(optional, "fp32"), fits(optional, "fp16"), words(optional)
(True, False, 'one of fp32, fp64 or null')
"""

from __future__ import annotations

import ast
from typing import Any

from streamrl.config.words import as_text

DTYPES = ("float32", "bfloat16", "float16", "uint8")  # as a configuration names torch's

_PLAIN: dict[str, type] = {"int": int, "bool": bool, "str": str, "list": list, "dict": dict}
_WORDS = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text", "list": "a list",
          "dict": "a mapping"}  # fmt: skip


def fits(annotation: ast.expr, value: Any) -> bool:
    """Whether a value of YAML is of a type."""
    return any(_is(each, value) for each in _alternatives(annotation))


def words(annotation: ast.expr) -> str:
    """What a field takes; "" where no value of YAML is."""
    each = [_word(part) for part in _alternatives(annotation)]
    if not any(word for word in each if word != "null"):
        return ""
    return " or ".join(dict.fromkeys(filter(None, each)))


def converted(annotation: ast.expr, value: Any) -> Any:
    """A value of YAML that fits as the type has it: torch's dtype by its name, a tuple for a list."""
    for each in _alternatives(annotation):
        if ast.unparse(each) == "torch.dtype" and value in DTYPES:
            import torch  # only a learner asks for values

            return getattr(torch, value)
        if _generic(each)[0] in ("Tuple", "tuple") and isinstance(value, list):
            return tuple(value)
    return value


def _is(annotation: ast.expr, value: Any) -> bool:
    """Whether a value of YAML is of one type that is no union."""
    name, arguments = _generic(annotation)
    if name == "Literal":
        return any(value == choice and type(value) is type(choice) for choice in map(ast.literal_eval, arguments))
    if name in ("List", "list"):
        return isinstance(value, list) and all(fits(arguments[0], each) for each in value)
    if name in ("Tuple", "tuple"):
        pairs = zip(arguments, value, strict=False) if isinstance(value, list) else ()
        return isinstance(value, list) and len(value) == len(arguments) and all(fits(a, v) for a, v in pairs)
    return value is None if isinstance(annotation, ast.Constant) else _is_plain(ast.unparse(annotation), value)


def _is_plain(name: str, value: Any) -> bool:
    if name == "torch.dtype":
        return value in DTYPES
    kind = int | float if name == "float" else _PLAIN.get(name)
    return kind is not None and isinstance(value, kind) and (name == "bool" or not isinstance(value, bool))


def _word(annotation: ast.expr) -> str:
    name, arguments = _generic(annotation)
    if name == "Literal":
        choices = ", ".join(as_text(ast.literal_eval(each)) for each in arguments)
        return choices if len(arguments) == 1 else f"one of {choices}"
    if name in ("List", "list"):
        return f"a list of {words(arguments[0])}" if words(arguments[0]) else ""
    if name in ("Tuple", "tuple"):
        return f"a list of {len(arguments)}: {', '.join(map(words, arguments))}"
    if isinstance(annotation, ast.Constant):
        return "null"
    plain = ast.unparse(annotation)
    return f"one of {', '.join(DTYPES)}" if plain == "torch.dtype" else _WORDS.get(plain, "")


def _alternatives(annotation: ast.expr) -> list[ast.expr]:
    """The types of a union, itself where it is none; `Optional[X]` is X and None."""
    if isinstance(annotation, ast.BinOp):
        return [*_alternatives(annotation.left), *_alternatives(annotation.right)]
    name, arguments = _generic(annotation)
    if name == "Optional":
        return [*_alternatives(arguments[0]), ast.Constant(None)]
    if name == "Union":
        return [each for argument in arguments for each in _alternatives(argument)]
    return [annotation]


def _generic(annotation: ast.expr) -> tuple[str, list[ast.expr]]:
    """(`List`, [int]) of `List[int]`; ("", []) of a plain type."""
    if not isinstance(annotation, ast.Subscript):
        return "", []
    inner = annotation.slice
    return ast.unparse(annotation.value), list(inner.elts) if isinstance(inner, ast.Tuple) else [inner]

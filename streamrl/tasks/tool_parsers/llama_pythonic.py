"""`llama_pythonic`: the whole answer is `[name(key=value), ...]`, as Llama 3.2 and 4 write it."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Sequence
from typing import Any

from streamrl.tasks.tool_calls import FunctionCall
from streamrl.tasks.tool_parsers.base import Called, ToolParser, as_json, unreadable

_LIST = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(.*\]\s*", re.S)
_MARKS = ("<|python_start|>", "<|python_end|>", "<|python_tag|>")

LONGEST = 100_000  # characters that are read as Python


class LlamaPythonic(ToolParser):
    """Python's calls with named literals, in a list."""

    marks = True

    def split(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Called]]:
        body = text
        for mark in _MARKS:
            body = body.replace(mark, "")
        if not _LIST.fullmatch(body):
            return text, []
        return "", _calls(body.strip())


def _calls(body: str) -> list[Called]:
    if len(body) > LONGEST:
        return [unreadable(f"the calls have more than {LONGEST} characters")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what a model writes in strings
            tree = ast.parse(body, mode="eval").body
            return [_call(each) for each in getattr(tree, "elts", ())]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [unreadable(f"the calls are no Python: {type(error).__name__}")]


def _call(node: ast.expr) -> Called:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        return unreadable("a call is name(key=value, ...)")
    name = ast.unparse(node.func)
    try:
        values = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
        return FunctionCall(name, as_json(values))
    except (ValueError, TypeError):
        return unreadable(f"the arguments of {name} must be literals that JSON has")

"""What reads the calls of one model family, and what all forms share."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from streamrl.choices import Choice, Options
from streamrl.tasks.tool_calls import FunctionCall, ToolCall

Called = FunctionCall | ToolCall  # a call, or a `ToolCall` whose `error` says in one line why it cannot be read


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refused)
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.S)


class ToolParser(Choice, ABC):
    """One form of calls. It runs in the worker's event loop, on one answer at a time."""

    marks: ClassVar[bool] = False
    """Is the form written with special tokens? Then the text that it is given has them."""

    def __init__(self, options: Options) -> None:
        """`options`: checked against `Options`."""
        self.options = options

    @abstractmethod
    def split(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[Called]]:
        """The text without its calls, and these, in order. What looks like a call and is none has its `error`.

        tools: those that the policy was told of, in OpenAI's form, by which values without a type get theirs.
        """


def split_tagged(text: str, read: Callable[[str], Called]) -> tuple[str, list[Called]]:
    """The text without what is between `<tool_call>` tags, and `read` of each; the last one may lack its end."""
    calls = [read(match[1]) for match in _TAGGED.finditer(text)]
    return (_TAGGED.sub("", text).strip() if calls else text), calls


def as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments as they are read again from the wire. Raises TypeError or ValueError for what JSON does not have.

    >>> as_json({"size": (3, 4)})
    {'size': [3, 4]}
    """
    read: dict[str, Any] = _DECODER.decode(json.dumps(values, allow_nan=False))
    return read


def unreadable(reason: str) -> ToolCall:
    """A call that cannot be read; `reason` goes to the model, in one line."""
    return ToolCall("", "", " ".join(reason.split()))


def of_json(text: str) -> Called:
    """A call as JSON with a `name` and its `arguments`."""
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        return unreadable(f"the call is no JSON: {type(error).__name__}")
    return of_value(value)


def of_value(value: Any, arguments: Sequence[str] = ("arguments",)) -> Called:
    """A call of a JSON value that is read; its arguments are under the first of these keys that is there."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return unreadable('a call is a JSON object with a "name"')
    key = next((key for key in arguments if key in value), None)
    return of_arguments(value["name"], value[key] if key is not None else {})


def of_arguments(name: str, arguments: Any) -> Called:
    """A call of `name` with arguments as a mapping, or as JSON of one."""
    if isinstance(arguments, str):
        try:
            arguments = _DECODER.decode(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return unreadable(f"the arguments of {name} are no JSON: {type(error).__name__}")
    if not isinstance(arguments, dict):
        return unreadable(f"the arguments of {name} must be a JSON object")
    return FunctionCall(name, arguments)


def values_of(text: str, separators: str) -> tuple[list[Any], str]:
    """The JSON values at the beginning of a text, with `separators` and spaces between them, and what is left."""
    values: list[Any] = []
    place = 0
    while True:
        while place < len(text) and (text[place].isspace() or text[place] in separators):
            place += 1
        try:
            value, end = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            return values, text[place:]
        values.append(value)
        place = end


def typed(name: str, key: str, text: str, tools: Sequence[dict[str, Any]]) -> Any:
    """An argument that is written without quotes: text where its tool says so, else JSON where it is that."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters") or {}
            about = parameters.get("properties", {}).get(key) if isinstance(parameters, dict) else None
            if isinstance(about, dict) and about.get("type") == "string":
                return text
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return text

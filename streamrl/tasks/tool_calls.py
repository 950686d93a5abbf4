"""How a policy writes that it wants a tool: the calls in a text, and the answer to a call.

Two forms are read, also mixed in one text:

    <tool name="python">print(6 * 7)</tool>                                  one argument, as it is
    <tool_call>{"name": "calculator", "arguments": {"expression": "6*7"}}</tool_call>      Hermes, Qwen

What cannot be read is a call too: its `error` is what the policy observes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_OPENING = re.compile(r'<tool name="(?P<name>[\w.-]{1,64})">|<tool_call>')
_NAMED_CLOSE, _JSON_CLOSE = "</tool>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. Example: `ToolCall("calculator", "6*7")`."""

    name: str  # of the tool; empty where the call cannot be read
    argument: str
    error: str | None = None


def parse_calls(text: str) -> list[ToolCall]:
    """Every call of `text`, in order.

    >>> parse_calls('so <tool name="calculator">6*7</tool>')
    [ToolCall(name='calculator', argument='6*7', error=None)]
    """
    return [
        _from_json(written.inside) if written.name is None else ToolCall(written.name, written.inside.strip())
        for written in _written(text)
    ]


class _Written(NamedTuple):
    """A call as it is written, from `start` to `end`."""

    start: int
    end: int
    name: str | None  # of the tool; None: in JSON
    inside: str


def _written(text: str) -> Iterator[_Written]:
    """The calls of `text`, in order. An opening behind the last close of its form is none: no text is read twice."""
    last = {close: text.rfind(close) for close in (_NAMED_CLOSE, _JSON_CLOSE)}
    place = 0
    while (opening := _OPENING.search(text, place)) is not None:
        close, place = _JSON_CLOSE if opening["name"] is None else _NAMED_CLOSE, opening.end()
        if place <= last[close]:
            inside = text[place : text.find(close, place)]
            place += len(inside) + len(close)
            yield _Written(opening.start(), place, opening["name"], inside)


def _from_json(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall("", "", f"the call is no JSON: {type(error).__name__}")
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments") if isinstance(call, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict) or len(arguments) != 1:
        return ToolCall("", "", 'a call has a "name" and "arguments" with one argument')
    (argument,) = arguments.values()
    return ToolCall(name, argument) if isinstance(argument, str) else ToolCall("", "", "the argument must be text")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """One call of a function with named arguments. Example: `FunctionCall("add", {"a": 6, "b": 7})`."""

    name: str
    arguments: dict[str, Any]


def named_calls(text: str) -> list[FunctionCall | ToolCall]:
    """Every call of `text`, in order: with its named arguments, or, as `<tool name=...>` has it, with one text.

    >>> named_calls('<tool_call>{"name": "add", "arguments": {"a": 6, "b": 7}}</tool_call>')
    [FunctionCall(name='add', arguments={'a': 6, 'b': 7})]
    """
    unreadable = ToolCall("", "", 'a call is JSON with a "name" and "arguments"')
    return [
        ToolCall(written.name, written.inside.strip())
        if written.name is not None
        else _function_call(written.inside) or unreadable
        for written in _written(text)
    ]


def split_calls(text: str) -> tuple[str, list[FunctionCall]]:
    """The text without its calls in JSON, and these, in order; one that cannot be read stays in the text.

    >>> split_calls('so <tool_call>{"name": "add", "arguments": {"a": 6}}</tool_call>')
    ('so', [FunctionCall(name='add', arguments={'a': 6})])
    """
    calls: list[FunctionCall] = []
    kept, place = list[str](), 0
    for written in _written(text):
        if written.name is None and (call := _function_call(written.inside)) is not None:
            calls.append(call)
            kept.append(text[place : written.start])
            place = written.end
    return ("".join([*kept, text[place:]]).strip() if calls else text), calls


def _function_call(text: str) -> FunctionCall | None:
    try:
        match json.loads(text):
            case {"name": str(name), "arguments": dict(arguments)}:
                return FunctionCall(name, arguments)
    except (ValueError, RecursionError):
        pass  # what cannot be read is text, as the policy wrote it
    return None


def describe_tools(descriptions: Sequence[tuple[str, str]]) -> str:
    """The text that tells a policy of its tools and their form: (name, what it does) of each."""
    tools = "\n".join(f"- {name}: {text}" for name, text in descriptions)
    return f'Tools:\n{tools}\nTo use one, write <tool name="NAME">ARGUMENT</tool> and wait for its answer.'

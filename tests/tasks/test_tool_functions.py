"""Typed functions as tools: what the policy is told of them, and what it reads when it calls one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import jsonschema
import pytest

from streamrl.tasks.functions.tools import LONGEST, ToolFunction, tools_of


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


async def look(where: Literal["left", "right"]) -> str:
    """Look somewhere."""
    return f"a wall on the {where}"


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


@dataclass
class Place:
    side: Side
    steps: int = 1


def walk(to: Place) -> str:
    """Walk."""
    return f"{to.steps} to the {to.side.value}"


def call(function, arguments):
    return asyncio.run(ToolFunction(function).call(arguments))


def test_a_tool_is_described_by_its_name_docstring_and_types():
    described = ToolFunction(add).description["function"]
    assert (described["name"], described["description"]) == ("add", "Add two numbers.")
    assert described["parameters"]["properties"]["a"]["type"] == "integer"
    assert described["parameters"]["required"] == ["a"]
    assert ToolFunction(look).description["function"]["parameters"]["properties"]["where"]["enum"] == ["left", "right"]
    assert ToolFunction(add).usage == "add(a, b): Add two numbers."


def test_a_tool_is_described_with_the_classes_of_its_arguments():
    parameters = ToolFunction(walk).description["function"]["parameters"]
    jsonschema.validate({"to": {"side": "left"}}, parameters)  # follows the references
    with pytest.raises(jsonschema.ValidationError, match="'up' is not one of"):
        jsonschema.validate({"to": {"side": "up"}}, parameters)
    assert call(walk, {"to": {"side": "left", "steps": 2}}) == "2 to the left"


def test_a_call_has_named_arguments_or_the_text_of_the_first():
    assert call(add, {"a": 6, "b": 7}) == "13"
    assert call(add, "6") == "7"
    assert call(look, {"where": "left"}) == "a wall on the left"


@pytest.mark.parametrize("arguments", [{"a": "six"}, {"b": 1}, {"a": 1, "c": 2}, "six"])
def test_arguments_that_do_not_fit_are_answered_by_an_error(arguments):
    assert call(add, arguments).startswith("error: ")


def test_what_a_tool_raises_is_read_by_the_policy_and_a_long_answer_is_cut():
    def broken(text: str) -> str:
        """Fails."""
        raise KeyError(text)

    def long(text: str) -> str:
        """Says much."""
        return text * LONGEST

    assert call(broken, "x") == "error: KeyError: 'x'"
    assert len(call(long, "xy")) == LONGEST


def test_functions_that_cannot_be_tools_are_refused_by_name():
    def silent(a: int) -> int:
        return a

    def untyped(a):
        """Has no type."""

    def starred(*a: int):
        """Takes any number."""

    def hidden(_a: int, b: int):
        """Has an argument that pydantic passes over."""

    def configured(model_config: int):
        """Has another."""

    for function, name in ((hidden, "_a"), (configured, "model_config")):
        with pytest.raises(ValueError, match=rf"^tools: {function.__name__} has the argument '{name}'; allowed: .*$"):
            ToolFunction(function)
    for function, words in ((silent, "no docstring"), (untyped, "'a' without a type"), (starred, "'a' without a type")):
        with pytest.raises(ValueError, match=f"tools: {function.__name__} has .*{words}"):
            ToolFunction(function)
    with pytest.raises(ValueError, match="tools: add is there twice"):
        tools_of([add, add])

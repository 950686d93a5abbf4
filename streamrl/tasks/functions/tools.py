"""A typed Python function as a tool: what the policy reads of it, and the answer to a call.

def add(a: int, b: int) -> int:
    '''Add two numbers.'''
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError

LONGEST = 4096  # characters of an answer: a context is a few times that


class ToolFunction:
    """One function.

    >>> import asyncio
    >>> def add(a: int, b: int = 1) -> int:
    ...     "Add two numbers."
    ...     return a + b
    >>> tool = ToolFunction(add)
    >>> tool.description["function"]["parameters"]["required"]
    ['a']
    >>> asyncio.run(tool.call({"a": 6, "b": "7"}))
    '13'
    """

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        """Raises ValueError for what is no function, or has no docstring, or an argument without a type."""
        if not hasattr(function, "__name__"):
            raise ValueError(f"tools: {function!r} is not allowed; allowed: a function with types and a docstring")
        self.name: str = name or function.__name__
        self._function = function
        text = inspect.cleandoc(function.__doc__ or "")
        if not text:
            raise ValueError(f"tools: {self.name} has no docstring, which the policy reads; allowed: one that has")
        try:
            signature = inspect.signature(function, eval_str=True)
        except NameError as error:
            raise ValueError(f"tools: {self.name}: {error}; allowed: types that its module knows") from None
        fields: dict[str, Any] = {}
        for each in signature.parameters.values():
            if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY) or each.annotation is each.empty:
                raise ValueError(f"tools: {self.name} has the argument {each.name!r} without a type; allowed: one with")
            fields[each.name] = (each.annotation, ... if each.default is each.empty else each.default)
        try:
            self._arguments = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)
            schema = self._arguments.model_json_schema()
        except (PydanticSchemaGenerationError, ValueError) as error:
            raise ValueError(f"tools: {self.name}: {str(error).splitlines()[0]}; allowed: types of JSON") from None
        if lost := fields.keys() - self._arguments.model_fields.keys():  # pydantic passes over some names
            raise ValueError(
                f"tools: {self.name} has the argument {min(lost)!r}; allowed: no leading _, no model_config"
            )
        parameters = {
            "type": "object",
            "properties": schema.get("properties", {}),
            "required": schema.get("required", []),
        }
        if "$defs" in schema:  # of classes, to which the properties refer
            parameters["$defs"] = schema["$defs"]
        self.description: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": text, "parameters": parameters},
        }

    @property
    def usage(self) -> str:
        """For a prompt of plain text: `add(a, b): Add two numbers.`"""
        names = ", ".join(self.description["function"]["parameters"]["properties"])
        return f"{self.name}({names}): {self.description['function']['description']}"

    async def call(self, arguments: Mapping[str, Any] | str) -> str:
        """The answer as text, at most LONGEST characters; whatever is raised is the answer, as an error.

        A text is the value of the first argument: what a policy writes that knows no JSON.
        """
        try:
            given = self._one(arguments) if isinstance(arguments, str) else arguments
            checked = self._arguments.model_validate(dict(given))
            said = self._function(**{name: getattr(checked, name) for name in type(checked).model_fields})
            said = await said if inspect.isawaitable(said) else said
        except ValidationError as error:
            first = error.errors()[0]
            return f"error: {'.'.join(map(str, first['loc'])) or self.name}: {first['msg']}"
        except Exception as error:  # the policy reads what its call led to
            return f"error: {type(error).__name__}: {error}"[:LONGEST]
        return str(said)[:LONGEST]

    def _one(self, text: str) -> dict[str, str]:
        name = next(iter(self._arguments.model_fields), None)
        return {} if name is None else {name: text}


def tools_of(functions: Sequence[Callable[..., Any]]) -> dict[str, ToolFunction]:
    """By their names. Raises ValueError for two of one name."""
    tools: dict[str, ToolFunction] = {}
    for function in functions:
        tool = ToolFunction(function)
        if tool.name in tools:
            raise ValueError(f"tools: {tool.name} is there twice; allowed: one function of each name")
        tools[tool.name] = tool
    return tools

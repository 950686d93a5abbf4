"""Tool calls and reasoning in the forms in which the chat templates of the families write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.choices import REASONING_PARSERS, TOOL_PARSERS
from streamrl.config.task import TaskConfig
from streamrl.tasks.parsing import Parsers
from streamrl.tasks.tool_calls import FunctionCall, ToolCall

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ADD = FunctionCall("add", {"a": 6, "b": [7]})
ROME = FunctionCall("weather", {"city": "Rome"})
HARMONY = "<|channel|>analysis<|message|>6*7<|end|><|start|>assistant"
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

# (parser, answer, the text without its calls, the calls)
READ = [
    ("hermes", 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 6, "b": [7]}}\n</tool_call>', "so", [ADD]),
    ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}', "", [ROME]),
    ("hermes", "no call", "no call", []),
    ("llama_json", '{"name": "add", "parameters": {"a": 6, "b": [7]}}', "", [ADD]),
    ("llama_json", '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}; {"name": "add", '
     '"parameters": {"a": 6, "b": [7]}}', "", [ROME, ADD]),
    ("llama_json", '{"answer": 42}', '{"answer": 42}', []),
    ("llama_pythonic", "[add(a=6, b=[7]), weather(city='Rome')]", "", [ADD, ROME]),
    ("llama_pythonic", "<|python_start|>[weather(city='Rome')]<|python_end|>", "", [ROME]),
    ("llama_pythonic", "[1, 2]", "[1, 2]", []),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 6, "b": [7]}, "id": "AbCdEfGhI"}]', "", [ADD]),
    ("mistral", 'so[TOOL_CALLS]add[ARGS]{"a": 6, "b": [7]}[TOOL_CALLS]weather[CALL_ID]x[ARGS]{"city": "Rome"}', "so",
     [ADD, ROME]),
    ("glm", "so\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>6</arg_value>\n<arg_key>b</arg_key>\n"
     "<arg_value>[7]</arg_value>\n</tool_call>", "so", [ADD]),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n</tool_call>", "",
     [FunctionCall("weather", {"city": "42"})]),
    ("glm", "<tool_call>now</tool_call>", "", [FunctionCall("now", {})]),
    ("qwen_xml", "<tool_call>\n<function=add>\n<parameter=a>\n6\n</parameter>\n<parameter=b>\n[7]\n</parameter>\n"
     "</function>\n</tool_call>", "", [ADD]),
    ("deepseek", f'so<｜tool▁calls▁begin｜>{BEGIN}function{SEP}add\n```json\n{{"a": 6, "b": [7]}}\n```{END}\n{BEGIN}'
     f'function{SEP}weather\n```json\n{{"city": "Rome"}}\n```{END}<｜tool▁calls▁end｜>', "so", [ADD, ROME]),
    ("deepseek", f'<｜tool▁calls▁begin｜>{BEGIN}weather{SEP}{{"city": "Rome"}}{END}<｜tool▁calls▁end｜>', "", [ROME]),
    ("harmony", f'{HARMONY}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 6, "b": [7]}}',
     "6*7", [ADD]),
    ("harmony", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>', "", [ROME]),
    ("harmony", f"{HARMONY}<|channel|>final<|message|>42", "6*7\n42", []),
]  # fmt: skip

MALFORMED = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 6</tool_call>'),
    ("hermes", '<tool_call>["add"]</tool_call>'),
    ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>"),
    ("llama_json", '{"name": "add", "parameters": {"a": 6'),
    ("llama_json", "<|python_tag|>print(6)"),
    ("llama_pythonic", "[add(6)]"),
    ("llama_pythonic", "[add(a=b)]"),
    ("llama_pythonic", "[add(a=6]"),
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": 6}]'),
    ("mistral", "[TOOL_CALLS]add[ARGS]{"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>6</tool_call>"),
    ("qwen_xml", "<tool_call>\n<function=add>\n<parameter=a>\n6\n</function>\n</tool_call>"),
    ("deepseek", f"<｜tool▁calls▁begin｜>{BEGIN}add{END}<｜tool▁calls▁end｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜>add"),
    ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": <|call|>'),
    ("harmony", " to=browser.open<|channel|>commentary<|message|>{}<|call|>"),
]

# (parser, answer, its reasoning, what is left)
THOUGHT = [
    ("think", "<think>\n6*7\n</think>\n\n42", "6*7", "42"),
    ("think", "<think>6*", "6*", ""),
    ("think", "42", "", "42"),
    ("think_opened", "6*7\n</think>\n\n42", "6*7", "42"),
    ("think_opened", "6*", "6*", ""),
    ("mistral_think", "[THINK]6*7[/THINK]42", "6*7", "42"),
    ("harmony_analysis", f"{HARMONY}<|channel|>final<|message|>42", "6*7", "42"),
    ("harmony_analysis", "42", "", "42"),
]


def parsers(tool: str | None = None, reasoning: str | None = None) -> Parsers:
    return Parsers.of(TaskConfig(tool_parser=tool, reasoning_parser=reasoning))


@pytest.mark.parametrize(("name", "answer", "text", "calls"), READ)
def test_calls_are_read_as_the_templates_write_them(name, answer, text, calls, completion):
    said = parsers(name).said(completion(answer), [WEATHER])
    assert (said.text, said.calls) == (text, calls)


@pytest.mark.parametrize(("name", "answer"), MALFORMED)
def test_a_malformed_call_is_one_line(name, answer, completion):
    calls = parsers(name).said(completion(answer)).calls
    bad = [call for call in calls if isinstance(call, ToolCall)]
    assert bad
    assert all(call.error and "\n" not in call.error for call in bad)


@pytest.mark.parametrize(("name", "answer", "reasoning", "text"), THOUGHT)
def test_reasoning_is_told_from_the_answer(name, answer, reasoning, text, completion):
    said = parsers(reasoning=name).said(completion(answer))
    assert (said.reasoning, said.text) == (reasoning, text)


def test_reasoning_and_calls_are_read_one_after_the_other(completion):
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    said = parsers("hermes", "think").said(completion(f"<think>shall I {call}?</think>{call}"))
    assert (said.text, said.calls) == ("", [ROME])
    assert "shall I" in said.reasoning
    answer = f'{HARMONY}<|channel|>commentary to=functions.weather<|message|>{{"city": "Rome"}}<|call|>'
    said = parsers("harmony", "harmony_analysis").said(completion(answer))
    assert (said.reasoning, said.text, said.calls) == ("6*7", "", [ROME])


MARKS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "{", "}", '"name"', "<arg_key>", "<function=a>", BEGIN, SEP,
     END, "<｜tool▁calls▁begin｜>", "<|message|>", "<|start|>", "to=functions.", "<think>", "</think>", "[a(", ")]", "a"]
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(MARKS | st.text(max_size=3), max_size=12).map("".join))
def test_no_text_breaks_a_parser(text):
    for kind in (TOOL_PARSERS, REASONING_PARSERS):
        for name in kind.names:
            kind.load(name)(kind.load(name).Options()).split(text)

"""Tool calls and reasoning in the forms in which the chat templates of the families write them."""

from __future__ import annotations

import asyncio
import random

import pytest

from streamrl.choices import REASONING_PARSERS, TOOL_PARSERS
from streamrl.config.task import TaskConfig, TaskShare
from streamrl.generate.tokenizer import Tokenizer
from streamrl.preflight.prompts import unread_variables
from streamrl.tasks.environment import Prompt
from streamrl.tasks.openai_session import Session
from streamrl.tasks.parsing import Parsers, apply
from streamrl.tasks.registry import build_task
from streamrl.tasks.tool_calls import FunctionCall, ToolCall

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
ADD = FunctionCall("add", {"a": 6, "b": [7]})
ROME = FunctionCall("weather", {"city": "Rome"})
END_TURN = "<|im_end|>"
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
    ("llama_pythonic", "[plot(size=(3, 4), by={1: 2})]", "",  # as they are read again from the wire
     [FunctionCall("plot", {"size": [3, 4], "by": {"1": 2}})]),
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
    ("llama_pythonic", "[add(a={6})]"),
    ("llama_pythonic", "[add(a=b'6')]"),
    ("llama_pythonic", "[add(a=1e999)]"),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
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


MARKS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "{", "}", '"name"', "<arg_key>", "<function=a>", BEGIN,
    SEP, END, "<｜tool▁calls▁begin｜>", "<|message|>", "<|start|>", "to=functions.", "<think>", "</think>",
    "[a(", ")]", "a", "\n",
]  # fmt: skip


def test_no_text_breaks_a_parser():
    rng = random.Random(3)
    built = [kind.load(name) for kind in (TOOL_PARSERS, REASONING_PARSERS) for name in kind.names]
    for _ in range(300):
        text = "".join(rng.choices(MARKS, k=rng.randint(0, 12)))
        for each in built:
            each(each.Options()).split(text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call>add<arg_key>" + "</arg_key><arg_value>" * 40_000),
        ("qwen_xml", "<tool_call><function=add>" + "<parameter=" * 200_000 + "</function>"),
    ],
)
def test_a_text_is_read_once_however_many_arguments_it_begins(name, text, completion):
    (call,) = parsers(name).said(completion(text)).calls  # to read it again from each takes longer than a test may
    assert "the arguments of add" in call.error


def test_messages_of_harmony_are_told_apart_one_by_one(completion):
    thought, other = "<|start|><|channel|>analysis<|message|>", "<|start|><|channel|>final<|message|>a"
    text = thought * 100_000 + other * 100_000  # to compare each with each takes longer than a test may
    assert parsers(reasoning="harmony_analysis").said(completion(text)).text.count("a") == 100_000


def test_the_task_tools_speaks_the_models_own_form(scripted):
    share = {"name": "tools", "args": {"task": {"name": "copy"}, "tools": ["calculator"]}}
    task = build_task(TaskShare.model_validate(share), 1, "train")
    apply(task, TaskConfig(tool_parser="hermes", reasoning_parser="think"))
    asked = Prompt(index=0, messages=({"role": "user", "content": "6*7?"},), answer="42")
    prompt = task._with_tools(asked)
    assert prompt.messages == asked.messages
    assert [tool["function"]["name"] for tool in prompt.tools] == ["calculator"]
    calls = [
        '<think><tool_call>{"name": "none"}</tool_call></think>'
        '<tool_call>{"name": "calculator", "arguments": {"input": "6*7"}}</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"input": ',
        "42",
    ]
    inference = scripted([[call, END_TURN] for call in calls])
    (rollout,) = asyncio.run(task.rollout_group(inference, prompt, 1))
    assert rollout.parts["tool_calls"] == 2.0
    assert "[tool] 42" in rollout.completion.text
    assert "[tool] error: the call is no JSON" in rollout.completion.text
    assert '"name": "calculator"' in inference.tokenizer.text([inference.asked[0].tolist()])[0]


def test_an_agent_is_given_calls_and_reasoning_apart(scripted):
    answer = '<think>6*7</think>[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'
    inference = scripted([[answer, END_TURN], ["[TOOL_CALLS]weather[ARGS]{", END_TURN]])
    session = Session(inference, Prompt(index=0, text="-"), most_calls=4, parsers=parsers("mistral", "think"))
    asked = [{"role": "user", "content": "where?"}]

    async def talk():
        _, first = await session.chat(asked, [WEATHER])
        given = {key: value for key, value in first.items() if key != "reasoning_content"}
        _, second = await session.chat([*asked, given, {"role": "tool", "content": "sunny"}], [WEATHER])
        return first, second

    first, second = asyncio.run(talk())
    assert first["reasoning_content"] == "6*7"
    assert first["content"] == ""
    assert [call["function"] for call in first["tool_calls"]] == [{"name": "weather", "arguments": {"city": "Rome"}}]
    assert second == {"role": "assistant", "content": "[TOOL_CALLS]weather[ARGS]{"}


def test_variables_reach_the_chat_template_and_unread_ones_are_told(chat_folder, tmp_path):
    for file in chat_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    asked = [{"role": "user", "content": "6*7?"}]
    tokenizer = Tokenizer(tmp_path, {"enable_thinking": False, "effort": "low"})
    assert tokenizer.rendered(asked) == "6*7?<think></think>"
    assert Tokenizer(tmp_path).rendered(asked) == "6*7?"
    assert unread_variables(tokenizer) == [
        "task.chat_template_kwargs: the model's chat template reads no variable 'effort'"
    ]
    ids = tokenizer.plain_ids("a<|im_end|>").tolist()
    assert tokenizer.marked([*ids, tokenizer.end_id]) == "a<|im_end|>"

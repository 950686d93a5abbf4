"""Anthropic's own client at the endpoint: its calls are one sample, token by token, as those of OpenAI's are."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config.task import TaskConfig
from streamrl.tasks import openai_server
from streamrl.tasks.anthropic_protocol import MessagesCall, message_reply
from streamrl.tasks.environment import Completion, Prompt
from streamrl.tasks.openai_server import OpenAIServer
from streamrl.tasks.openai_session import CallRefused, Session, shown
from streamrl.tasks.parsing import Parsers
from streamrl.tasks.registry import build_task

if TYPE_CHECKING:
    import anthropic  # which takes seconds, in each process that collects tests

END = "<|im_end|>"
USER = {"role": "user", "content": "6*7?"}
ADD = {"name": "add", "description": "a sum", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 6, "b": [7]}}</tool_call>'
COMMAND = """
import json, os, sys, urllib.request
question = json.load(sys.stdin)
def call(messages):
    body = json.dumps({"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 8, "messages": messages}).encode()
    with urllib.request.urlopen(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", body, timeout=60) as reply:
        return json.load(reply)["content"]
messages = [{"role": "user", "content": question["text"]}]
messages += [{"role": "assistant", "content": call(messages)}, {"role": "user", "content": "go on"}]
print(call(messages)[0]["text"])
"""


def talk(inference, agent, most_calls: int = 8):
    """What `agent(client)` returns, as Anthropic's client at a session of its own, and the session."""
    import anthropic

    async def go():
        server = OpenAIServer("127.0.0.1", 0)
        await server.start()
        session = Session(inference, Prompt(index=0, text="-"), most_calls=most_calls)
        try:
            async with (
                server.serving(session) as url,
                anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none") as client,
            ):
                return await agent(client), session
        finally:
            await server.close()

    return asyncio.run(go())


def ask(client: anthropic.AsyncAnthropic, *messages: Any, **options: Any):
    return client.messages.create(**{"model": "policy", "max_tokens": 64, "messages": list(messages), **options})


def said(message: anthropic.types.Message) -> dict[str, Any]:
    return {"role": "assistant", "content": message.content}


def result(message: anthropic.types.Message, content: Any) -> dict[str, Any]:
    """What the first tool that the message calls has given."""
    call = next(block for block in message.content if block.type == "tool_use")
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": content}]}


def test_a_use_of_a_tool_and_its_result_are_one_sample(scripted):
    inference = scripted([["so ", CALL, END], ["4", "2", END]])

    async def agent(client):
        first = await ask(client, USER, tools=[ADD], system="be brief")
        answered = (USER, said(first), result(first, "forty-two"))
        return first, await ask(client, *answered, tools=[ADD], system=[{"type": "text", "text": "be brief"}])

    (first, second), session = talk(inference, agent)
    text, call = first.content
    assert (text.text, call.name, call.input, first.stop_reason) == ("so", "add", {"a": 6, "b": [7]}, "tool_use")
    assert ([block.text for block in second.content], second.stop_reason) == (["42"], "end_turn")
    asked = inference.tokenizer.text([inference.asked[0].tolist()])[0]
    assert '"name": "add"' in asked
    assert "be brief" in asked
    sample = session.completion
    written = [inference.tokenizer.plain_ids(piece).tolist() for piece in ("so ", CALL, END, "4", "2", END)]
    assert sample.output_ids[sample.loss_mask].tolist() == [token for ids in written for token in ids]
    others = inference.tokenizer.text([sample.output_ids[~sample.loss_mask].tolist()])[0]
    assert "forty-two" in others
    assert "add" not in others
    so_far = [*sample.prompt_ids, *(token for ids in written[:3] for token in ids)]
    assert inference.asked[1][: len(so_far)].tolist() == so_far
    assert second.usage.input_tokens == len(inference.asked[1])
    assert second.usage.output_tokens == 3


def test_a_call_of_the_other_protocol_extends_the_session_too(scripted):
    import openai

    async def agent(client):
        first = await ask(client, USER)
        async with openai.AsyncOpenAI(base_url=f"{client.base_url}v1", api_key="none", timeout=30) as other:
            history = [USER, {"role": "assistant", "content": first.content[0].text}, USER]
            return await other.chat.completions.create(model="policy", messages=history)

    reply, session = talk(scripted([["ab", END], ["c", END]]), agent)
    assert reply.choices[0].message.content == "c"
    assert len(session.turns) == 2


def test_a_stream_has_the_same_content_in_well_formed_events(scripted):
    async def agent(client):
        options = {"model": "policy", "max_tokens": 64, "tools": [ADD]}
        async with client.messages.stream(messages=[USER], **options) as stream:
            first = await stream.get_final_message()
        answered = [USER, said(first), result(first, [{"type": "text", "text": "42"}])]
        events = [event async for event in await client.messages.create(messages=answered, stream=True, **options)]
        return first, events

    (first, events), session = talk(scripted([["so ", CALL, CALL, END], ["4", "2", END]]), agent)
    assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
    assert [block.input for block in first.content[1:]] == [{"a": 6, "b": [7]}] * 2
    assert (first.stop_reason, first.usage.output_tokens) == ("tool_use", len(session.turns[0].output_ids))
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event.type for event in events] == ["message_start", *block, "message_delta", "message_stop"]
    assert (events[2].delta.text, events[4].delta.stop_reason) == ("42", "end_turn")
    assert len(session.turns) == 2


def test_tokens_are_counted_as_the_next_call_has_them_and_nothing_is_asked(scripted):
    inference = scripted([["a", "b", END], ["c", END]])  # "ab" is one token: a rendering from texts has fewer

    async def agent(client):
        count, counted = client.messages.count_tokens, []
        counted.append(await count(model="policy", messages=[USER], tools=[ADD]))
        first = await ask(client, USER, tools=[ADD])
        extended = [USER, said(first), USER]
        counted.append(await count(model="policy", messages=extended, tools=[ADD]))
        counted.append(await count(model="policy", messages=[*extended, said(first)]))  # no call of this session
        return [first, await ask(client, *extended, tools=[ADD])], counted

    (replies, counted), session = talk(inference, agent, most_calls=2)
    assert [each.input_tokens for each in counted[:2]] == [reply.usage.input_tokens for reply in replies]
    assert counted[2].input_tokens > 0
    assert len(session.turns) == 2


SMALL = 4096  # bytes of a call, at most
TEXT = {"type": "text", "text": "ab"}
OTHER_TOOL = {"type": "web_search_20250305", "name": "web_search"}
REFUSED = [
    ({"messages": [{"role": "user", "content": "another"}]}, 409, "conflict_error", "does not extend"),
    ({"tools": [ADD]}, 409, "conflict_error", "does not extend"),
    ({"tools": [ADD], "tool_choice": {"type": "any"}}, 400, "invalid_request_error", "'any' is not allowed"),
    ({"tools": [ADD], "tool_choice": {"type": "none"}}, 400, "invalid_request_error", "'none' is not allowed"),
    ({"tools": [OTHER_TOOL]}, 400, "invalid_request_error", "'web_search' has no input_schema"),
    ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"messages": [USER, {"role": "assistant", "content": "ab"}]}, 400, "invalid_request_error", "the last one is"),
    ({"system": "x" * SMALL}, 413, "request_too_large", "more than"),
]


def test_a_call_that_cannot_be_a_part_of_the_sample_is_refused_and_the_session_goes_on(scripted, monkeypatch):
    import anthropic

    async def agent(client):
        first = await ask(client, USER)
        following = (USER, said(first), USER)
        errors = []
        for options, *_ in REFUSED:
            with pytest.raises(anthropic.APIStatusError) as found:
                await ask(client, *following, **options)
            errors.append(found.value)
        await ask(client, *following)
        return errors

    monkeypatch.setattr(openai_server.OpenAIServer, "largest", SMALL)
    errors, session = talk(scripted([["ab", END], ["c", END]]), agent)
    for error, (_, status, kind, reason) in zip(errors, REFUSED, strict=True):
        assert (error.status_code, error.body["type"], error.body["error"]["type"]) == (status, "error", kind)
        assert reason in error.body["error"]["message"]
    assert len(session.turns) == 2


def test_a_session_has_its_number_of_calls_and_ends_with_a_failed_one(scripted):
    import anthropic

    async def agent(client):
        first = await ask(client, USER)
        errors = []
        for _ in range(2):
            with pytest.raises(anthropic.APIStatusError) as found:
                await ask(client, USER, said(first), USER, stream=True)
            errors.append((found.value.status_code, found.value.body["error"]["type"]))
        return errors

    limited, _ = talk(scripted([["ab", END]]), agent, most_calls=1)
    assert limited == [(429, "rate_limit_error")] * 2
    failed, session = talk(scripted([["ab", END]]), agent)
    assert failed == [(529, "overloaded_error"), (404, "not_found_error")]
    assert session.completion.finish_reason == "abort"


@pytest.mark.parametrize("company", ["anthropic", "openai"])
def test_a_client_does_not_send_a_refused_call_again(scripted, company, monkeypatch):
    import anthropic
    import openai

    asked: list[Any] = []

    async def chat(self, *words, **options):
        asked.append(words)
        raise CallRefused(409, "no")

    async def agent(client):
        call = {"model": "policy", "max_tokens": 8, "messages": [USER]}
        if company == "anthropic":
            with pytest.raises(anthropic.ConflictError):
                await client.messages.create(**call)
        else:
            async with openai.AsyncOpenAI(base_url=f"{client.base_url}v1", api_key="-") as other:
                with pytest.raises(openai.ConflictError):
                    await other.chat.completions.create(**call)

    monkeypatch.setattr(Session, "chat", chat)
    talk(scripted([]), agent)
    assert len(asked) == 1


def test_a_command_finds_the_endpoint_in_its_environment(scripted, tmp_path: Path):
    async def go():
        arguments = {
            "task": {"name": "copy", "args": {"length": 2}},
            "command": f"{sys.executable} {tmp_path}/agent.py",
        }
        task = build_task(TaskConfig(name="agent", args=arguments), seed=1, split="train")
        answers = scripted([["first", END], [task.prompt(0).answer, END]])
        try:
            return await task.rollout_group(answers, task.prompt(0), 1)
        finally:
            await task.close()

    (tmp_path / "agent.py").write_text(COMMAND)
    (rollout,) = asyncio.run(go())
    assert (rollout.reward, rollout.parts["calls"]) == (1.0, 2.0)


def call_of(*messages: Any, **options: Any) -> MessagesCall:
    body = {"model": "policy", "max_tokens": 8, "messages": list(messages), **options}
    return msgspec.json.decode(json.dumps(body), type=MessagesCall)


def results(*contents: str) -> list[dict[str, Any]]:
    return [{"type": "tool_result", "tool_use_id": f"call_{each}", "content": each} for each in contents]


def test_messages_of_one_role_are_one_turn_and_each_result_is_a_message_of_its_own():
    use = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 6}}
    marked = {**TEXT, "cache_control": {"type": "ephemeral"}}
    apart = [
        USER,
        {"role": "assistant", "content": [marked]},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": results("1", "2")},
        {"role": "user", "content": "go"},
        {"role": "user", "content": [marked]},
    ]
    together = [
        {"role": "user", "content": [{"type": "text", "text": "6*7?"}]},
        {"role": "assistant", "content": [TEXT, use]},
        {"role": "user", "content": [*results("1", "2"), {"type": "text", "text": "go"}, TEXT]},
    ]
    conversation = call_of(*apart, system=[TEXT, TEXT]).conversation()
    assert conversation == call_of(*together, system="ab\nab").conversation()
    assert [(message["role"], message["content"]) for message in conversation] == [
        ("system", "ab\nab"),
        ("user", "6*7?"),
        ("assistant", "ab"),
        ("tool", "1"),
        ("tool", "2"),
        ("user", "go\nab"),
    ]
    function = {"name": "add", "arguments": {"a": 6}}
    assert conversation[2]["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]


@pytest.mark.parametrize(
    ("role", "block", "reason"),
    [
        ("user", {"type": "image", "source": {}}, "'image' is not understood here; allowed: text, tool_result"),
        ("user", {"type": "tool_use", "id": "1", "name": "add", "input": {}}, "allowed: text, tool_result"),
        ("user", {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}, "'image' is not"),
        ("user", {"type": "tool_result", "tool_use_id": "1", "content": 7}, "content 7 is not allowed"),
        ("user", {"type": "text"}, "'text' is not understood"),
        ("user", {}, "None is not understood"),
        ("assistant", {"type": "thinking", "thinking": "so", "signature": ""}, "'thinking' is not understood"),
        ("assistant", {"type": "tool_use", "id": "1", "name": "add", "input": "{}"}, "allowed: text, tool_use"),
        ("system", {"type": "tool_result", "tool_use_id": "1"}, "allowed: text"),
    ],
)
def test_a_block_that_is_not_understood_is_refused_in_one_line(role, block, reason):
    with pytest.raises(CallRefused) as found:
        call_of({"role": role, "content": [block]}, USER).conversation()
    assert found.value.status == 400
    assert reason in str(found.value)
    assert "\n" not in str(found.value)


def turn_of(text: str, finish_reason: str = "stop") -> Completion:
    ids = np.arange(3, dtype=np.int32)
    logprobs = np.zeros(3, np.float32)
    return Completion(
        text=text, prompt_ids=ids, output_ids=ids, logprobs=logprobs, spans=(), finish_reason=finish_reason
    )


@pytest.mark.parametrize(
    ("turn", "reason", "sequence"),
    [
        (turn_of("ab"), "end_turn", None),
        (turn_of("ab", "length"), "max_tokens", None),
        (turn_of("ab\nEnd"), "stop_sequence", "End"),
        (turn_of(f"{CALL}End"), "tool_use", None),
    ],
)
def test_the_reason_of_an_end_is_told_as_anthropic_has_it(turn, reason, sequence):
    call = call_of(USER, stop_sequences=["Stop", "End"])
    reply = json.loads(message_reply(call, turn, shown(turn, [ADD], Parsers())[0]))
    assert (reply["stop_reason"], reply["stop_sequence"]) == (reason, sequence)
    assert call.sampling() == {"most_new_tokens": 8, "stop": ["Stop", "End"]}


@settings(max_examples=30)
@given(st.text(max_size=20), st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=2))
def test_every_answer_comes_back_as_the_session_gave_it(text, arguments):
    call = f"<tool_call>{json.dumps({'name': 'add', 'arguments': arguments})}</tool_call>"
    for turn in (turn_of(text), turn_of(text + call), turn_of(call)):
        message = shown(turn, [ADD], Parsers())[0]
        reply = json.loads(message_reply(call_of(USER), turn, message))
        again = call_of(USER, {"role": "assistant", "content": reply["content"]}, USER).conversation()
        assert again[1] == message

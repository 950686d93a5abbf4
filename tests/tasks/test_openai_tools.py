"""OpenAI's own client at the endpoint: tools in the chat template, calls in the answer, replies in a stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.tasks.environment import Prompt
from streamrl.tasks.openai_server import OpenAIServer
from streamrl.tasks.openai_session import Session
from streamrl.tasks.tool_calls import FunctionCall, split_calls

END = "<|im_end|>"
USER = {"role": "user", "content": "6*7?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 6, "b": [7]}}</tool_call>'


def talk(inference, agent):
    """What `agent(client)` returns, as OpenAI's client at a session of its own, and the session."""

    async def go():
        server = OpenAIServer("127.0.0.1", 0)
        await server.start()
        session = Session(inference, Prompt(index=0, text="-"), most_calls=8)
        try:
            async with (
                server.serving(session) as url,
                openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client,
            ):
                return await agent(client), session
        finally:
            await server.close()

    return asyncio.run(go())


def ask(client: openai.AsyncOpenAI, *messages: Any, **options: Any):
    return client.chat.completions.create(model="policy", messages=list(messages), **options)


def test_a_call_of_a_tool_and_its_answer_are_one_sample(scripted):
    inference = scripted([["so ", CALL, END], ["4", "2", END]])

    async def agent(client):
        first = (await ask(client, USER, tools=[ADD])).choices[0]
        answer = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "forty-two"}
        second = (await ask(client, USER, first.message, answer, tools=[ADD])).choices[0]
        return first, second

    (first, second), session = talk(inference, agent)
    (call,) = first.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 6, "b": [7]})
    assert (first.message.content, first.finish_reason) == ("so", "tool_calls")
    assert (second.message.content, second.message.tool_calls, second.finish_reason) == ("42", None, "stop")
    text = inference.tokenizer.text
    assert '"name": "add"' in text([inference.asked[0].tolist()])[0]  # the policy is told of the tool
    sample = session.completion
    policy, others = sample.output_ids[sample.loss_mask], sample.output_ids[~sample.loss_mask]
    written = [inference.tokenizer.plain_ids(piece).tolist() for piece in ("so ", CALL, END, "4", "2", END)]
    assert policy.tolist() == [token for ids in written for token in ids]  # the call itself is trained, as sampled
    assert "forty-two" in text([others.tolist()])[0]
    assert "add" not in text([others.tolist()])[0]


def test_several_calls_are_answered_by_several_messages(scripted):
    inference = scripted([[CALL, CALL, END], ["ok", END]])

    async def agent(client):
        message = (await ask(client, USER, tools=[ADD])).choices[0].message
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in message.tool_calls]
        reply = await ask(client, USER, message.model_dump(exclude_none=True), *answers, tools=[ADD])
        return message, reply.choices[0].message

    (message, reply), session = talk(inference, agent)
    assert message.content is None
    assert len({call.id for call in message.tool_calls}) == 2
    assert reply.content == "ok"
    assert len(session.turns) == 2


def test_without_tools_a_call_is_text(scripted):
    reply, _ = talk(scripted([[CALL, END]]), lambda client: ask(client, USER))
    assert reply.choices[0].message.content == CALL
    assert reply.choices[0].message.tool_calls is None


@pytest.mark.parametrize("call", ["<tool_call>{</tool_call>", '<tool_call>{"name": "add", "arguments": 7}</tool_call>'])
def test_a_call_that_cannot_be_read_is_text_as_the_policy_wrote_it(scripted, call):
    reply, _ = talk(scripted([[call, END]]), lambda client: ask(client, USER, tools=[ADD]))
    assert reply.choices[0].message.content == call
    assert reply.choices[0].finish_reason == "stop"


@given(st.text(alphabet='<tool_call>/{}":,name arguments[]1 \n', max_size=80))
def test_no_text_breaks_the_parting_into_text_and_calls(text):
    wrapped = f"<tool_call>{text}</tool_call>"
    for each in (text, wrapped):
        rest, calls = split_calls(each)
        assert calls or rest == each
    assert split_calls(f"a {CALL} b") == ("a  b", [FunctionCall("add", {"a": 6, "b": [7]})])


def refused(inference, agent, kind=openai.APIStatusError):
    with pytest.raises(kind) as found:
        talk(inference, agent)
    return found.value.status_code, found.value.message


def test_other_tools_or_a_changed_call_do_not_extend_the_session(scripted):
    async def other_tools(client):
        message = (await ask(client, USER, tools=[ADD])).choices[0].message
        return await ask(client, USER, message, USER)

    async def other_arguments(client):
        message = (await ask(client, USER, tools=[ADD])).choices[0].message
        message.tool_calls[0].function.arguments = "{}"
        return await ask(client, USER, message, USER, tools=[ADD])

    for agent in (other_tools, other_arguments):
        status, message = refused(scripted([[CALL, END]]), agent)
        assert status == 409
        assert "does not extend" in message


def test_what_would_not_be_the_policys_own_choice_is_refused(scripted):
    for options, reason in (
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice: 'required' is not allowed"),
        ({"n": 2}, "n: 2 is not allowed"),
    ):
        status, message = refused(scripted([]), lambda client, chosen=options: ask(client, USER, **chosen))
        assert (status, reason in message) == (400, True)


def test_tools_that_the_chat_template_does_not_tell_of_are_refused(scripted, tmp_path, chat_tokenizer, monkeypatch):
    monkeypatch.setattr(chat_tokenizer, "_render", lambda messages, tools=(): "the same whatever the tools")
    status, message = refused(scripted([["a", END]]), lambda client: ask(client, USER, tools=[ADD]))
    assert status == 400
    assert "does not tell of tools" in message


def test_a_streamed_answer_has_the_same_content(scripted):
    inference = scripted([["4", "2", END], [CALL, END]])

    async def agent(client):
        text = [event async for event in await ask(client, USER, stream=True, stream_options={"include_usage": True})]
        said = {"role": "assistant", "content": "42"}
        calls = [event async for event in await ask(client, USER, said, USER, stream=True)]
        return text, calls

    (text, calls), session = talk(inference, agent)
    assert "".join(choice.delta.content or "" for event in text for choice in event.choices) == "42"
    assert [choice.finish_reason for event in text for choice in event.choices] == [None, None, "stop"]
    assert text[-1].usage.completion_tokens == 3
    assert all(event.usage is None for event in calls)
    assert len(session.turns) == 2


def test_streamed_calls_of_tools_and_streamed_plain_text(scripted):
    async def calls(client):
        async with client.chat.completions.stream(model="policy", messages=[USER], tools=[ADD]) as stream:
            events = [event.chunk async for event in stream if event.type == "chunk"]
            deltas = [call for event in events for call in event.choices[0].delta.tool_calls or ()]
            assert [delta.index for delta in deltas] == [0, 1]
            return await stream.get_final_completion()

    async def plain(client):
        stream = await client.completions.create(model="policy", prompt="x=", stream=True)
        return [event.choices[0] async for event in stream]

    final, _ = talk(scripted([[CALL, CALL, END]]), calls)
    assert [call.function.name for call in final.choices[0].message.tool_calls] == ["add", "add"]
    assert final.choices[0].finish_reason == "tool_calls"
    events, _ = talk(scripted([["ab", END]]), plain)
    assert [(choice.text, choice.finish_reason) for choice in events] == [("ab", "stop")]


def test_a_refusal_is_a_status_also_where_a_stream_was_wanted(scripted):
    status, _ = refused(scripted([]), lambda client: ask(client, USER, stream=True), openai.InternalServerError)
    assert status == 503

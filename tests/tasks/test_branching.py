"""Which branch a call of an agent goes on with, and what becomes of a session that has several."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.config.task import OverlongConfig, TaskConfig
from streamrl.tasks import parsing
from streamrl.tasks.branching import extended
from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import FAILED, Branch, Completion, Prompt, Rollout
from streamrl.tasks.megatron_rl import TokenRollout
from streamrl.tasks.megatron_rl.policy import Asked, Recorder
from streamrl.tasks.megatron_rl.samples import Episodes
from streamrl.tasks.openai_server import OpenAIServer
from streamrl.tasks.openai_session import CallRefused, Session
from streamrl.tasks.overlong import OVERLONG, Overlong
from streamrl.tasks.registry import build_task
from streamrl.tasks.scoring import judgements
from tests.documented_commands import ROOT, blocks

END = "<|im_end|>"
HISTORIES = st.lists(st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(tuple) | st.none(), max_size=6)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@given(histories=HISTORIES, call=st.lists(st.sampled_from("ab"), min_size=1, max_size=5).map(tuple))
def test_a_call_goes_on_with_the_longest_history_that_it_begins_with_and_goes_beyond(histories, call):
    place = extended(histories, call)
    fitting = [
        number
        for number, history in enumerate(histories)
        if history is not None and any(call == (*history, *more) for more in tails(call))
    ]
    if place is None:
        assert not fitting
        return
    longest = max(len(histories[number]) for number in fitting)
    assert place == min(number for number in fitting if len(histories[number]) == longest)


def tails(call: Sequence[str]) -> list[Sequence[str]]:
    """All that a call may end with, but nothing."""
    return [call[start:] for start in range(1, len(call))]


@given(histories=HISTORIES, call=st.text("ab", min_size=1, max_size=5))
def test_texts_are_matched_as_messages_are(histories, call):
    texts = [None if history is None else "".join(history) for history in histories]
    assert extended(texts, call) == extended(histories, tuple(call))


# What an agent does next: begin a conversation, or go on with one of those that it has.
STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from("xy")), min_size=1, max_size=8)


@settings(max_examples=40)
@given(steps=STEPS)
def test_every_call_of_an_agent_that_keeps_several_conversations_extends_its_own_token_by_token(scripted_once, steps):
    inference = scripted_once([["a", "b", END]] * len(steps))  # "ab" is one token: a text read again has another

    async def go() -> tuple[Session, list[tuple[list[Any], list[Completion]]]]:
        session = Session(inference, Prompt(index=0, text="-"), most_calls=len(steps), max_branches=len(steps))
        kept: list[tuple[list[Any], list[Completion]]] = []
        for number, (place, text) in enumerate(steps):
            if place >= len(kept):
                kept.append(([user(f"{number}")], []))  # no two begin alike
            else:
                kept[place][0].append(user(text))
            messages, turns = kept[min(place, len(kept) - 1)]
            turn, message = await session.chat(messages)
            messages.append(message)
            turns.append(turn)
        return session, kept

    session, kept = asyncio.run(go())
    completions = [*(branch.completion for branch in session.branches), session.completion]
    assert len(completions) == len(kept)
    for _, turns in kept:
        (whole,) = [each for each in completions if each.prompt_ids.tolist() == turns[0].prompt_ids.tolist()]
        drawn = np.concatenate([turn.output_ids for turn in turns])
        assert whole.output_ids[whole.loss_mask].tolist() == drawn.tolist()
        before = [*turns[-1].prompt_ids, *turns[-1].output_ids]
        assert before == [*whole.prompt_ids, *whole.output_ids]
    assert session.completion.output_ids[-3:].tolist() == session.turns[-1].output_ids.tolist()


@pytest.fixture(scope="module")
def scripted_once(chat_tokenizer):
    """`scripted` for tests of many examples."""
    from tests.tasks.conftest import Scripted

    return lambda answers: Scripted(chat_tokenizer, answers)


def calls(inference, *bodies: tuple[str, dict[str, Any]], max_branches: int = 4):
    """The statuses of the calls of one session over HTTP, and the session."""

    async def go():
        server = OpenAIServer("127.0.0.1", 0)
        await server.start()
        session = Session(inference, Prompt(index=0, text="-"), most_calls=8, max_branches=max_branches)
        statuses = []
        try:
            async with server.serving(session) as url, aiohttp.ClientSession() as client:
                for path, body in bodies:
                    address = url.removesuffix("/v1") if path.startswith("/v1") else url
                    async with client.post(address + path, json={"model": "policy", **body}) as reply:
                        statuses.append(reply.status)
        finally:
            await server.close()
        return statuses, session

    return asyncio.run(go())


def chat(*messages: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
    return "/chat/completions", {"messages": list(messages), **more}


ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "call",
    [
        chat(user("another")),
        chat(user("q?"), said("reworded"), user("go on")),
        chat(user("q?")),
        chat(user("q?"), said("ab"), user("go on"), tools=[ADD]),
        ("/completions", {"prompt": "q?ab and"}),
        ("/v1/messages", {"messages": [user("another")], "max_tokens": 4}),
    ],
    ids=["another prompt", "reworded", "the same again", "other tools", "plain text", "the other protocol"],
)
def test_what_extends_no_branch_begins_one_and_those_before_go_on(scripted, call):
    following = chat(user("q?"), said("ab"), user("go on"))
    statuses, session = calls(scripted([["a", "b", END], ["x", END], ["c", END]]), chat(user("q?")), call, following)
    assert statuses == [200, 200, 200]
    (other,) = session.branches
    assert other.completion.text.endswith("x")
    assert len(session.turns) == 3
    assert session.completion.output_ids[session.completion.loss_mask].tolist() == [
        *session.turns[0].output_ids,
        *session.turns[2].output_ids,
    ]


def test_a_branch_too_many_is_refused_and_said_so(scripted):
    bodies = [chat(user(text)) for text in "qrs"]
    statuses, session = calls(scripted([["a", END]] * 3), *bodies, max_branches=2)
    assert statuses == [200, 200, 409]
    assert str(session.exceeded).endswith("(task.max_branches=2)")
    assert len(session.branches) == 1


def test_a_refused_call_leaves_no_branch(scripted):
    inference = scripted([["a", END], ["b", END]])
    drawn = inference.generate

    async def generate(prompt, n, *, images=(), at_least=None, **sampling):
        if sampling:
            raise ValueError("temperature: 0 draws greedily")
        return await drawn(prompt, n, at_least=at_least)

    inference.generate = generate
    statuses, session = calls(
        inference, chat(user("q")), chat(user("r"), temperature=0), chat(user("s")), max_branches=2
    )
    assert statuses == [200, 400, 200]
    assert session.exceeded is None
    assert len(session.turns) == 2


def test_calls_of_several_branches_are_answered_at_the_same_time_and_none_extends_one_that_is_awaited(scripted):
    inference = scripted([["ab", END]] * 3)
    drawn, arrived = inference.generate, asyncio.Barrier(2)

    async def generate(prompt, n, **options):
        if len(inference.asked):
            await arrived.wait()  # the first of them would wait for ever for a second that is not let in
        return await drawn(prompt, n, **options)

    async def go() -> Session:
        session = Session(inference, Prompt(index=0, text="-"), most_calls=3, max_branches=2)
        await session.chat([user("q")])
        history = [user("q"), said("ab"), user("go on")]
        async with asyncio.timeout(10):
            await asyncio.gather(session.chat(history), session.chat(history))
        with pytest.raises(CallRefused, match="its 3 calls"):
            await session.chat(history)
        return session

    inference.generate = generate
    session = asyncio.run(go())
    completions = [session.branches[0].completion, session.completion]
    assert sorted(int(each.loss_mask.sum()) for each in completions) == [2, 4]


def test_a_call_that_no_server_answers_fails_all_branches(scripted):
    statuses, session = calls(scripted([["a", END]]), chat(user("q")), chat(user("r")), chat(user("s")))
    assert statuses == [200, 503, 410]
    assert session.is_unanswered
    assert session.completion.finish_reason == "abort"


def play(inference, function: Path, max_branches: int = 16, **args: Any) -> Rollout:
    """The one rollout of the task `agent`, as a run with that `task.max_branches` has it."""

    async def go() -> list[Rollout]:
        share = {"name": "copy", "args": {"length": 2}}
        config = TaskConfig(
            name="agent", args={"task": share, "function": f"{function}:agent", **args}, max_branches=max_branches
        )
        task = build_task(config, seed=1, split="train")
        parsing.apply(task, config)
        try:
            return await task.rollout_group(inference, task.prompt(0), 1)
        finally:
            await task.close()

    (rollout,) = asyncio.run(go())
    return rollout


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """The agent of the page: it solves, sums up, and answers from the summary."""
    (text,) = [text for kind, text in blocks(ROOT / "docs" / "openai.md") if kind == "python"]
    (tmp_path / "summing_agent.py").write_text(text)
    return tmp_path / "summing_agent.py"


def test_the_agent_of_the_page_gives_two_branches_of_one_reward(scripted, agent):
    answer = build_task(TaskConfig(name="copy", args={"length": 2}), seed=1, split="train").prompt(0).answer
    rollout = play(scripted([["work", END], ["sum", END], [answer, END]]), agent)
    assert (rollout.reward, rollout.parts["calls"]) == (1.0, 3.0)
    (solved,) = rollout.branches
    assert solved.reward is None
    assert "work" in solved.completion.text
    assert solved.completion.text.endswith("sum")
    assert rollout.completion.text == answer


def test_an_agent_with_a_branch_too_many_has_the_lowest_reward_and_its_event_says_why(scripted, agent):
    rollout = play(scripted([["work", END], ["sum", END]]), agent, max_branches=1)
    assert (rollout.reward, rollout.parts, rollout.masked) == (0.0, {FAILED: 1.0}, False)
    assert rollout.failure.startswith("TooManyBranches: ")
    assert rollout.failure.endswith("(task.max_branches=1)")
    assert judgements([rollout]) == [rollout.failure]


def test_the_task_of_the_page_writes_from_its_note(scripted):
    (text,) = [text for kind, text in blocks(ROOT / "docs" / "tasks.md") if "class SummedUp" in text]
    names: dict[str, Any] = {}
    exec(compile(text, "tasks.md", "exec"), names)
    task = names["SummedUp"](None, 1, "train")
    (rollout,) = asyncio.run(task.rollout_group(scripted([["note"], ["aa"]]), task.prompt(0), 1))
    assert (rollout.reward, rollout.completion.text) == (1.0, "aa")
    assert [branch.completion.text for branch in rollout.branches] == ["note"]


def test_the_longest_branch_is_the_one_that_comes_near_the_cut():
    def of(tokens: int) -> Completion:
        ids = np.zeros(tokens, np.int32)
        return Completion(
            text="", prompt_ids=ids, output_ids=ids, logprobs=ids.astype(np.float32), spans=(), finish_reason="stop"
        )

    rollout = Rollout(completion=of(2), reward=1.0, branches=(Branch(completion=of(9), reward=0.5),))
    penalised = Overlong(OverlongConfig(buffer=4), longest=10).penalised(rollout)
    assert penalised.parts[OVERLONG] == -0.75
    assert penalised.reward == 0.25
    assert penalised.branches[0].reward == 0.5


def test_a_rollout_of_megatron_rl_may_be_of_several_conversations(scripted):
    inference = scripted([["a", END], ["b", END], ["c", END]])

    async def asked() -> Recorder:
        recorder = Recorder(inference)
        for text in ("q", "r", "s"):
            conversation = Conversation(inference, Prompt(index=0, messages=(user(text),)))
            recorder.asked.append(Asked(conversation))
            await conversation.generate()
        return recorder

    recorder = asyncio.run(asked())
    ids = [asked.token_ids()[0] for asked in recorder.asked]
    episodes = Episodes([recorder])
    found = episodes.completions(TokenRollout(trajectory=[ids[1], ids[0]], reward=1.0))
    assert [each.text for each in found] == ["b", "a"]
    assert episodes.unnamed().text == "c"


def test_the_page_names_every_status_of_a_call():
    page = (ROOT / "docs" / "openai.md").read_text()
    statuses = set(re.findall(r"CallRefused\((\d+)", (ROOT / "streamrl/tasks/openai_session.py").read_text()))
    assert statuses == {"400", "409", "410", "429", "503"}
    assert all(f"{status}" in page for status in statuses)

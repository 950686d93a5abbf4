"""Agents that talk OpenAI's protocol over real HTTP: their calls are one sample, and what they ask is recorded."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import tracemalloc
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from streamrl.config.task import TaskConfig
from streamrl.tasks.environment import FAILED, Prompt, Rollout
from streamrl.tasks.episodes import NotPlayed
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.openai_server import OpenAIServer
from streamrl.tasks.openai_session import Session
from streamrl.tasks.process_pipes import exchange
from streamrl.tasks.registry import build_task

END = "<|im_end|>"
USER = {"role": "user", "content": "q?"}
TOOL = {"role": "tool", "content": "42"}
UNREADABLE = {"id": "a", "function": {"name": "f", "arguments": "["}}
COMMAND = """
import json, os, sys, urllib.request
question = json.load(sys.stdin)
def call(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, timeout=20) as reply:
        return json.load(reply)["choices"][0]["message"]
messages = [{"role": "user", "content": question["text"]}]
messages += [call(messages), {"role": "tool", "content": "go on"}]
print(call(messages)["content"])
"""


def session_calls(inference, calls: list[tuple[str, dict[str, Any]]], most_calls: int = 8):
    """The status and body of each call of one session, and the session."""

    async def go():
        server = OpenAIServer("127.0.0.1", 0)
        await server.start()
        session = Session(inference, Prompt(index=0, text="-"), most_calls=most_calls)
        replies = []
        try:
            async with server.serving(session) as url, aiohttp.ClientSession() as client:
                for path, body in calls:
                    async with client.request("POST" if body else "GET", url + path, json=body or None) as reply:
                        replies.append((reply.status, await reply.json()))
        finally:
            await server.close()
        return replies, session

    return asyncio.run(go())


def chat(*messages: dict[str, Any], **options: Any) -> tuple[str, dict[str, Any]]:
    return "/chat/completions", {"model": "policy", "messages": list(messages), **options}


def test_calls_that_extend_one_another_are_one_sample(scripted):
    inference = scripted([["a", "b", END], ["c", END]])
    said = {"role": "assistant", "content": "ab"}
    replies, session = session_calls(inference, [chat(USER, logprobs=True, temperature=0.3), chat(USER, said, TOOL)])
    assert [status for status, _ in replies] == [200, 200]
    choice = replies[0][1]["choices"][0]
    assert choice["message"] == said
    assert choice["finish_reason"] == "stop"
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [-1, -2, -3]
    whole = session.completion
    first = [
        *inference.tokenizer.plain_ids("a"),
        *inference.tokenizer.plain_ids("b"),
        *inference.tokenizer.plain_ids(END),
    ]
    assert whole.output_ids[:3].tolist() == first
    assert "42" in inference.tokenizer.text([whole.output_ids[~whole.loss_mask].tolist()])[0]
    assert replies[1][1]["usage"]["prompt_tokens"] == len(inference.asked[1])


def test_completions_of_plain_text_extend_one_another_too(scripted):
    inference = scripted([["ab"], ["c"]])
    calls = [("/completions", {"prompt": "x="}), ("/completions", {"prompt": "x=aby="})]
    replies, session = session_calls(inference, calls)
    assert [reply["choices"][0]["text"] for _, reply in replies] == ["ab", "c"]
    assert session.completion.loss_mask.tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("call", "status", "reason"),
    [
        (chat({"role": "user", "content": "another"}), 409, "does not extend"),
        (chat(USER, {"role": "assistant", "content": "reworded"}, TOOL), 409, "does not extend"),
        (chat(USER, {"role": "assistant", "content": "ab"}), 409, "does not extend"),
        (chat(USER, n=2), 400, "n: 2 is not allowed"),
        (chat(USER, tools=[{}]), 409, "does not extend"),
        (
            chat({"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "["}}]}),
            400,
            "JSON",
        ),
        (chat({"role": "user", "content": [{"type": "image_url"}]}), 400, "no text"),
        (chat(), 400, "messages"),
        (("/completions", {"prompt": "q?"}), 409, "does not extend"),
    ],
)
def test_a_call_that_cannot_be_a_part_of_the_sample_is_refused_and_the_session_goes_on(scripted, call, status, reason):
    inference = scripted([["ab", END], ["c", END]])
    following = chat(USER, {"role": "assistant", "content": "ab"}, TOOL)
    replies, session = session_calls(inference, [chat(USER), call, following])
    assert [found for found, _ in replies] == [200, status, 200]
    assert reason in replies[1][1]["error"]["message"]
    assert len(session.turns) == 2


def test_a_session_has_its_number_of_calls_and_ends_with_a_failed_one(scripted):
    said = {"role": "assistant", "content": "ab"}
    replies, _ = session_calls(scripted([["ab", END], ["c", END]]), [chat(USER), chat(USER, said, TOOL)], most_calls=1)
    assert [status for status, _ in replies] == [200, 429]
    replies, session = session_calls(scripted([["ab", END]]), [chat(USER), chat(USER, said, TOOL), chat(USER)])
    assert [status for status, _ in replies] == [200, 503, 410]
    assert session.completion.finish_reason == "abort"


def test_the_model_is_listed_and_a_stranger_finds_nothing(scripted):
    ((status, reply),), _ = session_calls(scripted([]), [("/models", {})])
    assert (status, reply["data"][0]["id"]) == (200, "policy")
    ((status, _),), _ = session_calls(scripted([]), [("/../../stranger/v1/models", {})])
    assert status == 404


def silenced(inference) -> tuple[asyncio.Event, asyncio.Event]:
    """Have the policy answer nothing: it is asked, and that is given up."""
    asked, given_up = asyncio.Event(), asyncio.Event()

    async def generate(*args, **options):
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    inference.generate = generate
    return asked, given_up


@pytest.mark.parametrize("first", ["client", "session"])
def test_a_call_of_the_policy_ends_with_its_client_and_with_its_session(scripted, first):
    inference = scripted([["ab", END]])
    session = Session(inference, Prompt(index=0, text="-"), most_calls=1)
    path, body = chat(USER)

    async def go() -> list[int]:
        server = OpenAIServer("127.0.0.1", 0)
        await server.start()
        asked, given_up = silenced(inference)
        statuses = []
        async with asyncio.timeout(60), aiohttp.ClientSession() as client:
            async with server.serving(session) as url:
                call = asyncio.create_task(client.post(url + path, json=body))
                await asked.wait()
                if first == "client":
                    call.cancel()
                    await given_up.wait()
                    del inference.generate
                    assert session.turns == []
                    statuses.append((await client.post(url + path, json=body)).status)
            assert given_up.is_set()
            if first == "session":
                assert session.turns == []
                statuses.append((await call).status)
            statuses.append((await client.post(url + path, json=body)).status)
        await server.close()
        return statuses

    assert asyncio.run(go()) == ([200, 404] if first == "client" else [410, 404])
    assert len(session.turns) == (first == "client")


def test_a_call_that_is_given_up_leaves_its_branch_as_it_was(scripted):
    inference = scripted([["ab", END], ["c", END]])
    session = Session(inference, Prompt(index=0, text="-"), most_calls=2)

    async def go() -> None:
        _, said = await session.chat([USER])
        before = session.completion.output_ids.tolist()
        asked, _ = silenced(inference)
        call = asyncio.create_task(session.chat([USER, said, TOOL]))
        await asked.wait()
        call.cancel()
        await asyncio.wait((call,))
        assert session.completion.output_ids.tolist() == before
        del inference.generate
        await session.chat([USER, said, TOOL])

    asyncio.run(go())
    assert len(session.turns) == 2
    assert session.completion.text.count("42") == 1


def play(inference, n: int = 1, **args: Any):
    async def go():
        share = {"name": "copy", "args": {"length": 2}}
        task = build_task(TaskConfig(name="agent", args={"task": share, **args}), seed=1, split="train")
        try:
            return await task.rollout_group(inference, task.prompt(0), n), task.prompt(0)
        finally:
            await task.close()

    return asyncio.run(go())


def test_a_command_acts_as_the_environment(scripted, tmp_path: Path):
    (tmp_path / "agent.py").write_text(COMMAND)
    answer = build_task(TaskConfig(name="copy", args={"length": 2}), seed=1, split="train").prompt(0).answer
    (rollout,), _ = play(scripted([["first", END], [answer, END]]), command=f"{sys.executable} {tmp_path / 'agent.py'}")
    assert rollout.reward == 1.0
    assert rollout.parts["calls"] == 2.0
    assert not rollout.completion.loss_mask.all()


def test_what_a_command_prints_beyond_an_answer_is_read_and_kept_nowhere(scripted, tmp_path: Path):
    (tmp_path / "agent.py").write_text(f"{COMMAND}\nfor _ in range(2048): print('x' * (1 << 15))\n")
    said = [["first", END], ["ab", END]]
    tracemalloc.start()
    try:
        (rollout,), _ = play(scripted(said), command=f"{sys.executable} {tmp_path / 'agent.py'}")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rollout.failure is None
    assert most < 32 << 20


def test_a_command_may_print_before_it_reads_its_question(tmp_path: Path):
    (tmp_path / "agent.py").write_text("import sys\nprint('x' * (1 << 20))\nprint(len(sys.stdin.read()))\n")

    async def go() -> bytes:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(tmp_path / "agent.py"), stdin=pipe, stdout=pipe
        )
        async with asyncio.timeout(60):
            printed = await exchange(process, b"y" * (1 << 20), 2 << 20)
            assert await process.wait() == 0
        return printed

    assert asyncio.run(go()).split()[1] == str(1 << 20).encode()


AGENTS = """
    import asyncio, os, time
    from pathlib import Path

    import aiohttp

    async def lazy(base_url, question):
        return "ab"

    async def one_is_lazy(base_url, question):
        try:
            os.close(os.open(f"{__file__}.seen", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return await asks_once(base_url, question)
        return "ab"

    async def asks_once(base_url, question):
        async with aiohttp.ClientSession() as client:
            async with client.post(f"{base_url}/completions", json={"prompt": question["text"]}) as reply:
                await reply.json()
        if "answer" in question:
            raise AssertionError("the right answer was told")
        return None

    async def hangs(base_url, question):
        await asks_once(base_url, question)
        await asyncio.sleep(60)

    async def blocks(base_url, question):
        await asks_once(base_url, question)
        time.sleep(1e9)

    async def blocks_until_released(base_url, question):
        await asks_once(base_url, question)
        here = Path(__file__)
        here.with_name("blocks").touch()
        while not here.with_name("released").exists():
            time.sleep(0.05)

    async def raises(base_url, question):
        await asks_once(base_url, question)
        raise KeyError("tool")

    async def exits(base_url, question):
        await asks_once(base_url, question)
        os._exit(1)
"""


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    path = tmp_path / "agents.py"
    path.write_text(textwrap.dedent(AGENTS))
    return path


def test_a_function_acts_as_the_environment(scripted, agents):
    answer = build_task(TaskConfig(name="copy", args={"length": 2}), seed=1, split="train").prompt(0).answer
    rollouts, _ = play(scripted([[answer, END], ["x", END]]), n=2, function=f"{agents}:asks_once")
    assert sorted(rollout.reward for rollout in rollouts)[1] == 1.0


@pytest.mark.parametrize(
    ("agent", "reason", "masked"),
    [
        ("hangs", "not done in 3 seconds", False),
        ("blocks", "not done in 3 seconds", False),
        ("raises", "KeyError: 'tool'", False),
        ("exits", "ScorerLost: the process of exits has ended: exit code 1", True),
    ],
)
def test_an_agent_that_fails_costs_its_sample(scripted, agents, agent, reason, masked):
    timeout = 3.0 if agent in ("hangs", "blocks") else 60.0
    (rollout,), _ = play(scripted([["ab", END]]), function=f"{agents}:{agent}", timeout=timeout)
    assert rollout.masked == masked
    assert (rollout.reward, rollout.parts) == (0.0, {} if masked else {FAILED: 1.0})
    assert reason in rollout.failure


def test_an_agent_whose_process_ends_is_masked_whatever_its_questions_count_as_a_wrong_answer(scripted, agents):
    async def go() -> list[Rollout]:
        args = {"task": {"name": "copy", "args": {"length": 2}}, "function": f"{agents}:exits"}
        task = build_task(TaskConfig(name="agent", args=args), seed=1, split="train")
        task.infrastructure = (ScorerUnready,)  # as rows with a judge of their own have it
        try:
            return await task.rollout_group(scripted([["ab", END]]), task.prompt(0), 1)
        finally:
            await task.close()

    (rollout,) = asyncio.run(go())
    assert (rollout.masked, rollout.parts) == (True, {})
    assert "ScorerLost: the process of exits has ended: exit code 1" in (rollout.failure or "")


def test_the_start_of_no_process_is_the_agents_time(scripted, agents, tmp_path):
    """The module takes longer to import than the agent has; two at once need two processes."""
    slow = tmp_path / "slow.py"
    slow.write_text(f"import time\ntime.sleep(6.0)\n{agents.read_text()}")
    rollouts, _ = play(scripted([["ab", END]] * 2), n=2, function=f"{slow}:asks_once", timeout=5.0, processes=2)
    assert [rollout.failure for rollout in rollouts] == [None, None]


def test_an_agent_that_blocks_does_not_stop_the_endpoint_of_the_others(scripted, agents):
    blocks, released = agents.with_name("blocks"), agents.with_name("released")

    async def go() -> list[Rollout]:
        args = {"task": {"name": "copy", "args": {"length": 2}}, "function": f"{agents}:blocks_until_released"}
        task = build_task(TaskConfig(name="agent", args=args), seed=1, split="train")
        try:
            blocked = asyncio.create_task(task.rollout_group(scripted([["ab", END]]), task.prompt(0), 1))
            server = await task._endpoint()
            while not blocks.exists():
                assert not blocked.done()
                await asyncio.sleep(0.05)
            session = Session(scripted([]), task.prompt(0), most_calls=1)
            async with server.serving(session) as base_url:
                for _ in range(20):
                    async with aiohttp.ClientSession() as client, client.get(f"{base_url}/models") as reply:
                        assert reply.status == 200
            assert not blocked.done()
            released.touch()
            return await blocked
        finally:
            await task.close()

    (rollout,) = asyncio.run(go())
    assert rollout.failure is None


def test_an_agent_that_asks_nothing_gives_no_sample_and_where_none_asks_the_task_has_failed(scripted, agents):
    rollouts, _ = play(scripted([["ab", END]]), n=2, function=f"{agents}:one_is_lazy")
    asked, lazy = sorted(rollouts, key=lambda rollout: rollout.failure is not None)
    assert asked.is_answered
    assert (lazy.is_answered, lazy.completion.failure) == (False, "task")
    assert lazy.failure == "NotPlayed: the agent asked the policy nothing"
    with pytest.raises(NotPlayed, match="asked the policy nothing"):
        play(scripted([]), n=2, function=f"{agents}:lazy")
    with pytest.raises(NotPlayed, match="the agent's command ended with code 1"):
        play(scripted([]), n=2, command="false")


def test_an_agent_whose_first_call_the_policy_does_not_answer_has_asked_and_lacks_a_servers_answer(scripted, agents):
    inference = scripted([])
    asked, given_up = silenced(inference)
    rollouts, _ = play(inference, n=2, function=f"{agents}:asks_once", timeout=6.0, processes=1)
    assert asked.is_set()
    assert given_up.is_set()
    assert [(rollout.is_answered, rollout.completion.failure) for rollout in rollouts] == [(False, "server")] * 2
    assert all("not done in 6 seconds" in rollout.failure for rollout in rollouts)


def test_an_error_of_the_policy_is_that_of_the_group_whatever_the_agent_makes_of_it(scripted, agents):
    async def lost(*_, **__):
        raise ConnectionError("server lost")

    inference = scripted([])
    inference.generate = lost
    with pytest.raises(ConnectionError, match=r"^server lost$"):
        play(inference, n=2, function=f"{agents}:asks_once")


def test_a_missing_function_is_refused(scripted):
    with pytest.raises(ValueError, match=r"task\.args\.function: 'no\.such:agent' cannot be loaded"):
        play(scripted([]), function="no.such:agent")
    with pytest.raises(ValueError, match="either a command or a function"):
        play(scripted([]))


def test_a_call_whose_sampling_is_refused_leaves_the_session_as_it_was_and_the_others_choose_theirs(scripted):
    inference = scripted([["a", "b", ".", END], ["c", END]])
    asked = []

    async def generate(prompt, n, *, images=(), at_least=None, **sampling):
        asked.append(sampling)
        if sampling.get("temperature") == 0:
            raise ValueError("temperature: 0 draws greedily")
        return await type(inference).generate(inference, prompt, n, at_least=at_least)

    inference.generate = generate
    said = {"role": "assistant", "content": "ab"}
    own = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 3, "stop": ".", "stop_token_ids": [5]}
    greedy = {"temperature": 0}
    calls = [chat(USER, **greedy), chat(USER, **own), chat(USER, said, TOOL, **greedy), chat(USER, said, TOOL)]
    replies, session = session_calls(inference, calls)
    assert [status for status, _ in replies] == [400, 200, 400, 200]
    assert "draws greedily" in replies[0][1]["error"]["message"]
    assert replies[1][1]["choices"][0]["message"] == said  # without the stop string, which its tokens have
    assert asked[1] == own
    assert len(session.turns) == 2
    assert session.completion.text.count("42") == 1

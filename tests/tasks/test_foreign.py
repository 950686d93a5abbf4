"""Environments of other libraries: the real packages, each in a virtual environment that the test makes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, WSMsgType, web
from aiohttp.test_utils import TestServer

from streamrl.config.task import TaskConfig
from streamrl.tasks.built_in import openenv
from streamrl.tasks.environment import FAILED, Rollout
from streamrl.tasks.foreign.gymnasium import _is_number
from streamrl.tasks.registry import build_task
from streamrl.tasks.turns import TURNS
from tests.foreign_environments import EXAMPLES, python_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(580)]

END = "<|im_end|>"
LOAD_TIMEOUT = 200.0  # seconds; the libraries import for long on two busy cores
LETTERS = f"{EXAMPLES / 'letters.py'}:load_environment"
RECALL = f"{EXAMPLES / 'recall.py'}:Recall"


def play(name: str, inference: Any, n: int, index: int = 0, split: str = "train", **args: Any) -> list[Rollout]:
    async def go() -> list[Rollout]:
        task = build_task(TaskConfig(name=name, args=args), 1, split)
        try:
            return await task.rollout_group(inference, await task.fetch(index), n)
        finally:
            await task.close()

    return asyncio.run(go())


def verifiers(inference: Any, n: int, kind: str, **more: Any) -> list[Rollout]:
    given = {"environment": LETTERS, "options": {"kind": kind, "count": 1}, "held_out": 1e-9, **more}
    return play("verifiers", inference, n, python=str(python_of("verifiers")), start_timeout=LOAD_TIMEOUT, **given)


def read(inference: Any, ids: np.ndarray) -> str:
    return inference.tokenizer.text([ids.tolist()])[0]


def test_a_single_turn_of_verifiers_has_the_rubrics_functions_as_parts_and_the_tokens_that_were_drawn(scripted):
    inference = scripted([["a", "a", END], ["ab", END]])  # "a" twice: no tokenizer would cut the text so for "ab"
    rollouts = verifiers(inference, 2, "single")
    assert sorted(rollout.reward for rollout in rollouts) == [0.5, 1.0]
    for rollout in rollouts:
        assert rollout.parts == {"repeated": rollout.reward, "ended": 1.0, "num_turns": 1.0, "calls": 1.0}
        assert rollout.completion.loss_mask.all()
        assert rollout.completion.logprobs.tolist() == [-1, -2, -3][: len(rollout.completion.output_ids)]
    assert "aa" in read(inference, inference.asked[0])


def test_several_turns_of_verifiers_are_one_sample_with_a_mask(scripted):
    inference = scripted([["a", "a", END], ["ha", END]])
    (rollout,) = verifiers(inference, 1, "twice")
    assert (rollout.reward, rollout.parts["repeated_again"], rollout.parts["num_turns"]) == (1.0, 1.0, 2.0)
    assert "ha" in read(inference, rollout.completion.output_ids[~rollout.completion.loss_mask])


def test_a_tool_of_verifiers_is_offered_called_and_answers(scripted):
    call = '<tool_call>{"name": "shout", "arguments": {"text": "abc"}}</tool_call>'
    inference = scripted([[call, END], ["done", END]])
    (rollout,) = verifiers(inference, 1, "tool")
    assert '"shout"' in read(inference, inference.asked[0])
    assert "ABC" in read(inference, rollout.completion.output_ids[~rollout.completion.loss_mask])
    assert (rollout.parts["total_tool_calls"], rollout.parts["shout_calls"]) == (1.0, 1.0)


def test_a_rubric_of_verifiers_that_sees_the_group_scores_it_together(scripted):
    rollouts = verifiers(scripted([["b", "b", END], ["a", "b", END]]), 2, "group")
    assert sorted(rollout.reward for rollout in rollouts) == [0.0, 1.0]


def test_an_environment_of_verifiers_is_found_by_its_name(scripted, tmp_path, monkeypatch):
    (tmp_path / "my_letters.py").write_text((EXAMPLES / "letters.py").read_text())
    monkeypatch.chdir(tmp_path)
    (rollout,) = verifiers(scripted([["aa", END]]), 1, "single", environment="my-letters")
    assert rollout.reward == 1.0


def test_an_answer_without_text_and_one_that_no_server_gave(scripted):
    (empty,) = verifiers(scripted([[END]]), 1, "single")
    assert (empty.reward, empty.failure) == (0.0, None)
    (lost,) = verifiers(scripted([]), 1, "single")
    assert lost.completion.finish_reason == "abort"


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"options": {"kind": "sandbox"}}, "is a SandboxEnv, which needs a sandbox elsewhere"),
        ({"environment": f"{EXAMPLES / 'letters.py'}:rows", "options": {"count": 1}}, "gives a Dataset; allowed"),
        ({"environment": "no-such-environment"}, "no-such-environment"),
        ({"environment": "nowhere.py:load_environment"}, "no file nowhere.py"),
        ({"options": {"no_such": 1}}, "no_such"),
    ],
)
def test_what_verifiers_cannot_play_here_is_refused_by_name_in_one_line(scripted, more, named):
    with pytest.raises(ValueError, match=r"^task\.args\.environment: ") as refused:
        verifiers(scripted([]), 1, "single", **more)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def gymnasium(inference: Any, n: int, **args: Any) -> list[Rollout]:
    given = {"environment": RECALL, "python": str(python_of("gymnasium")), "start_timeout": LOAD_TIMEOUT, **args}
    return play("gymnasium", inference, n, **given)


def shown(rollout: Rollout, inference: Any) -> str:
    return read(inference, rollout.completion.prompt_ids)


@pytest.mark.parametrize("chat", [True, False])
def test_a_gymnasium_episode_is_one_sample_and_its_group_has_one_beginning(scripted, chat):
    inference = scripted([["ab", END]] * 6)
    rollouts = gymnasium(inference, 3, chat=chat, system="repeat ")
    assert len({shown(rollout, inference) for rollout in rollouts}) == 1
    assert "repeat" in shown(rollouts[0], inference)
    for rollout in rollouts:
        assert set(rollout.parts) == {"last", "turns", "calls"}
        assert rollout.parts["turns"] == 2.0
        assert not rollout.completion.loss_mask.all()
    other = gymnasium(inference := scripted([["ab", END]] * 2), 1, index=1, chat=chat, system="repeat ")
    assert shown(other[0], inference) != shown(rollouts[0], inference)


@pytest.mark.parametrize("value", [True, 2, 0.5, np.bool_(True), np.int64(3), np.float32(0.5), np.array(1)])
def test_a_number_of_numpy_is_one_for_a_gymnasium_environment(value):
    assert _is_number(value)


@pytest.mark.parametrize("value", ["1", None, [1], np.array([1]), np.str_("a")])
def test_what_is_no_number_is_no_part_of_a_reward(value):
    assert not _is_number(value)


def test_a_gymnasium_environment_that_raises_costs_its_own_sample_alone(scripted):
    rollouts = gymnasium(scripted([["x", END], ["b", END], ["b", END]]), 2, options={"fails_on": "x"})
    failed = [rollout for rollout in rollouts if rollout.failure]
    assert [rollout.failure for rollout in failed] == ["RuntimeError: the environment broke"]
    assert failed[0].parts == {FAILED: 1.0}


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ("CartPole-v1", "its observation_space is Box("),
        (f"{EXAMPLES / 'recall.py'}:Seen", "its observation_space is Box("),
        ("NoSuch-v0", "NoSuch"),
    ],
)
def test_a_gymnasium_environment_that_speaks_no_text_is_refused(scripted, environment, named):
    with pytest.raises(ValueError, match=r"^task\.args\.") as refused:
        gymnasium(scripted([]), 1, environment=environment)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@contextmanager
def openenv_server(*words: str) -> Iterator[str]:
    """Its address, while it runs."""
    command = [str(python_of("openenv")), str(EXAMPLES / "recall_server.py"), *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        urllib.request.urlopen(f"{url}/health", timeout=LOAD_TIMEOUT).close()
        yield url
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_an_openenv_server_plays_a_group_over_sessions_of_its_own(scripted):
    with openenv_server("2") as url:  # fewer sessions than samples: they are waited for
        inference = scripted([["ab", END]] * 8)
        rollouts = play("openenv", inference, 4, url=url, reset={"length": 3}, system="repeat ", parallel=4)
        assert len({shown(rollout, inference) for rollout in rollouts}) == 1
        for rollout in rollouts:
            assert rollout.parts == {TURNS: 2.0}
            assert 0.0 <= rollout.reward <= 1.0
            assert not rollout.completion.loss_mask.all()
        (plain,) = play("openenv", scripted([["ab"], ["ab"]]), 1, url=url, chat=False, action={"text": "a{text}"})
        assert plain.parts == {TURNS: 2.0}
        (broken,) = play("openenv", scripted([["hh", END]]), 1, url=url)
        assert broken.parts == {FAILED: 1.0}
        assert "the environment broke" in broken.failure
        for args, named in (
            ({"action": "word"}, "action: word is not allowed"),
            ({"action": {"text": "a"}}, "has no {text}"),
            ({"observation": "text"}, "observation: text is not allowed; allowed: one of"),
        ):
            with pytest.raises(ValueError, match=r"^task\.args\.") as refused:
                play("openenv", scripted([]), 1, url=url, **args)
            assert named in str(refused.value)
    with pytest.raises(ValueError, match=r"^task\.args\.url: .*/schema: .*refused; allowed: "):
        play("openenv", scripted([]), 1, url=url)


def test_a_server_that_asks_whether_openenvs_session_lives_is_answered_while_the_policy_thinks():
    async def play() -> None:
        ponged = asyncio.Event()

        async def session(request: web.Request) -> web.WebSocketResponse:
            socket = web.WebSocketResponse(autoping=False)
            await socket.prepare(request)
            async for message in socket:
                if message.type is WSMsgType.PONG:
                    ponged.set()
                    continue
                await socket.send_json({"type": "observation", "data": {"observation": {"asked": message.data}}})
                await socket.ping()
            return socket

        app = web.Application()
        app.router.add_get("/ws", session)
        async with TestServer(app) as server, ClientSession() as client:
            episode = openenv.Episode(client, str(server.make_url("/ws")), LOAD_TIMEOUT)
            await episode.begin({"seed": 1})
            async with asyncio.timeout(LOAD_TIMEOUT):
                await ponged.wait()  # nothing is asked meanwhile
            observed = await episode.ask("step", {"text": "ab"})
            assert '"ab"' in observed.observation["asked"]
            await episode.close()

    asyncio.run(play())


def test_a_tool_of_an_openenv_server_is_called_with_what_the_policy_says(scripted):
    action = {"type": "call_tool", "tool_name": "echo", "arguments": {"message": "<{text}>"}}
    with openenv_server("4", "tools") as url:
        inference = scripted([["ab", END], ["cd", END]])
        (rollout,) = play("openenv", inference, 1, url=url, action=action, observation="result.data", max_turns=2)
    assert (rollout.reward, rollout.parts) == (0.0, {TURNS: 2.0})
    assert "ready" in shown(rollout, inference)  # the first observation has no such field: all of it is shown
    assert "echo of <ab>" in read(inference, rollout.completion.output_ids[~rollout.completion.loss_mask])

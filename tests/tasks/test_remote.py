"""Environments over HTTP: a real server of tasks, its client, and what happens when it is not there."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web

from streamrl.config import Config
from streamrl.config.task import ScoringConfig, TaskConfig
from streamrl.tasks.built_in.lookup import CALLED
from streamrl.tasks.built_in.remote import RemoteFailed
from streamrl.tasks.environment import EXACT, FAILED, Completion, Environment, Prompt, Rollout, Score
from streamrl.tasks.host_wire import OWN
from streamrl.tasks.hosted import host_task
from streamrl.tasks.listening import is_local, run
from streamrl.tasks.registry import build_task
from streamrl.tasks.serve import application
from streamrl.tasks.turns import TURNS
from tests.tasks.hosting import completion

END = "<|im_end|>"
TASKS = {"task": {"mix": [{"name": "copy"}, {"name": "lookup", "args": {"length": 2}}]}}


COMPARED = """
from streamrl.tasks.environment import Prompt
from streamrl.tasks.grouped import Contrastive


class Shorter(Contrastive):
    def prompt(self, index):
        return Prompt(index=index, text="?")

    async def preference(self, prompt, first, second):
        return float(len(first.text) < len(second.text))
"""


NAMED = """
from streamrl.tasks.environment import Prompt, Score
from streamrl.tasks.turns import TurnByTurn


class Named(TurnByTurn):
    def __init__(self, arguments, seed, split):
        self.split = split

    def prompt(self, index):
        return Prompt(index=index, text="?", answer=f"{__name__} {self.split} {index}")

    async def observation(self, prompt, turns):
        return prompt.answer

    async def trajectory_reward(self, prompt, turns):
        return Score(reward=float(turns[-1].text == prompt.answer))
"""


def remote(url: str, **args: Any) -> Environment:
    return build_task(TaskConfig(name="remote", args={"url": url, "pause": 0.01, **args}), seed=1, split="train")


async def served(app: web.Application, use: Callable[[str], Awaitable[Any]]) -> Any:
    """`use(address)` while `app` listens."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return await use(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def play(app: web.Application, path: str, inference: Any, n: int, **args: Any) -> list[Rollout]:
    async def use(address: str) -> list[Rollout]:
        task = remote(address + path, **args)
        try:
            return await task.rollout_group(inference, task.prompt(0), n)
        finally:
            await task.close()

    return asyncio.run(served(app, use))


def test_a_remote_task_of_one_turn_scores_as_it_does_here(scripted):
    config = Config.model_validate(TASKS)
    answer = build_task(config.task.shares[0], config.run.seed, "train").prompt(0).answer
    right, wrong = play(application(config), "/copy", scripted([[answer, END], ["x", END]]), n=2)
    assert (right.reward, right.parts) == (1.0, {EXACT: 1.0})
    assert wrong.reward < 1.0
    assert right.completion.loss_mask is None


def test_a_remote_task_of_several_turns_is_played_turn_by_turn(scripted):
    config = Config.model_validate(TASKS)
    prompt = build_task(config.task.shares[1], config.run.seed, "train").prompt(0)
    inference = scripted([[prompt.metadata["key"], END], [prompt.answer, END]])
    (rollout,) = play(application(config), "/lookup", inference, n=1)
    assert rollout.parts == {EXACT: 1.0, CALLED: 1.0, TURNS: 2.0} | {TURNS: rollout.parts[TURNS]}
    assert rollout.reward == 1.0
    assert not rollout.completion.loss_mask.all()


def test_a_reward_model_scores_the_prompts_of_a_local_task(scripted):
    async def score(request: web.Request) -> web.Response:
        asked = await request.json()
        texts = [turns[-1]["text"] for turns in asked["answers"]]
        return web.json_response({"scores": [{"reward": float(len(text))} for text in texts]})

    app = web.Application()
    app.router.add_post("/score", score)
    rollouts = play(app, "", scripted([["a"], ["cde"]]), n=2, task={"name": "copy"})
    assert [rollout.reward for rollout in rollouts] == [1.0, 3.0]


@pytest.fixture
def server_of_a_class(tmp_path) -> web.Application:
    """The class `theirs.py:Named`, at /named."""
    (tmp_path / "theirs.py").write_text(NAMED)
    task = {"label": "named", "name": f"{tmp_path}/theirs.py:Named"}
    return application(Config.model_validate({"task": {"mix": [task], "scoring": {"processes": 1}}}))


def test_a_served_class_judges_the_prompt_that_it_is_sent_where_both_sides_host_a_class(server_of_a_class, tmp_path):
    (tmp_path / "mine.py").write_text(NAMED)

    async def use(address: str) -> tuple[Prompt, list[Rollout]]:
        args = {"url": f"{address}/named", "task": {"name": f"{tmp_path}/mine.py:Named"}}
        config = TaskConfig(name="remote", args=args, scoring=ScoringConfig(processes=1))
        task = await host_task(config, 1, "train", config)
        try:
            prompt = await task.fetch(3)
            return prompt, await task.score_all(prompt, [completion(prompt.answer), completion("x")])
        finally:
            await task.close()

    prompt, rollouts = asyncio.run(served(server_of_a_class, use))
    assert prompt.answer.endswith("mine train 3")
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]


def test_a_served_class_takes_no_index_of_a_process_of_the_caller_for_its_own(server_of_a_class):
    prompt = {"index": 3, "text": "?", "answer": "of the caller", "metadata": {OWN: 3}}
    turn = {"text": "of the caller", "finish_reason": "stop"}

    async def use(address: str) -> list[Any]:
        bodies = {"prompt": {"index": 3, "split": "probe"}, "observation": {"prompt": prompt, "turns": [turn]}}
        bodies["score"] = {"prompt": prompt, "answers": [[turn]]}
        async with ClientSession(f"{address}/named/") as http:
            return [await (await http.post(path, json=body)).json() for path, body in bodies.items()]

    made, observed, judged = asyncio.run(served(server_of_a_class, use))
    assert made["answer"].endswith("theirs probe 3")
    assert OWN not in made["metadata"]
    assert observed["text"] == "of the caller"
    assert judged["scores"][0]["reward"] == 1.0


def judged_alone(app: web.Application, path: str, **args: Any) -> Score:
    """The score that a remote task gives to one answer."""

    async def use(address: str) -> Score:
        task = remote(address + path, **args)
        try:
            return await task.score(task.prompt(0), Completion.failed(np.empty(0, np.int32)))
        finally:
            await task.close()

    return asyncio.run(served(app, use))


@pytest.mark.parametrize("local", [{}, {"task": {"name": "copy"}}])
def test_a_server_that_judges_groups_is_not_asked_for_the_score_of_one_answer(scripted, tmp_path, local):
    (tmp_path / "compared.py").write_text(COMPARED)
    task = {"name": f"{tmp_path}/compared.py:Shorter", "scoring": {"processes": 1}}
    config = Config.model_validate({"task": task})
    path = f"/{config.task.shares[0].key}"
    with pytest.raises(ValueError, match=r"^task\.args\.url: http://\S+ judges the answers of a group") as refused:
        judged_alone(application(config), path, **local)
    assert str(refused.value).endswith("; allowed: a task that judges each answer alone")
    assert "\n" not in str(refused.value)
    rollouts = play(application(config), path, scripted([["a", END], ["bbb", END]]), n=2, **local)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]


@pytest.mark.parametrize("about", [{"max_turns": 1, "lowest_reward": 0.0}, {"text": "none"}, 404, 501])
def test_a_server_that_does_not_say_whether_it_judges_groups_judges_one_answer(about):
    async def score(_: web.Request) -> web.Response:
        return web.json_response({"scores": [{"reward": 2.0}]})

    async def say(_: web.Request) -> web.Response:
        return web.Response(status=about) if isinstance(about, int) else web.json_response(about)

    app = web.Application()
    app.add_routes([web.post("/score", score), web.get("/about", say)])
    assert judged_alone(app, "", task={"name": "copy"}, tries=1).reward == 2.0


@pytest.mark.parametrize(
    ("reply", "reason", "masked"),
    [
        ({"scores": [{"reward": 1.0}]}, "1 scores for 2 answers", True),
        ({"scores": "no"}, "not a reply", True),
        ({"scores": [{"reward": 0.0, "failure": "KeyError: x"}] * 2}, "KeyError: x", False),
        ({"scores": [{"reward": 0.0, "failure": "ScorerLate: x", "masked": True}] * 2}, "ScorerLate: x", True),
    ],
)
def test_a_reply_that_does_not_fit_costs_the_samples_their_reward(scripted, reply, reason, masked):
    async def score(request: web.Request) -> web.Response:
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/score", score)
    rollouts = play(app, "", scripted([["a"], ["b"]]), n=2, task={"name": "copy"})
    assert [rollout.parts for rollout in rollouts] == [{} if masked else {FAILED: 1.0}] * 2
    assert [rollout.masked for rollout in rollouts] == [masked] * 2
    assert reason in rollouts[0].failure


def test_a_call_is_made_again_when_the_server_fails_and_hangs(scripted):
    calls = []

    async def score(request: web.Request) -> web.Response:
        calls.append(1)
        if len(calls) == 1:
            return web.Response(status=500)
        if len(calls) == 2:
            await asyncio.sleep(30)
        return web.json_response({"scores": [{"reward": 1.0}]})

    app = web.Application()
    app.router.add_post("/score", score)
    (rollout,) = play(app, "", scripted([["a"]]), n=1, task={"name": "copy"}, timeout=1.0)
    assert (rollout.reward, len(calls)) == (1.0, 3)


def test_no_call_waits_for_the_connection_of_another_one(scripted):
    calls = 120  # more than aiohttp makes connections, unless it is told otherwise
    together = asyncio.Barrier(calls)

    async def score(request: web.Request) -> web.Response:
        await together.wait()
        return web.json_response({"scores": [{"reward": 1.0}]})

    async def use(address: str) -> list[list[Rollout]]:
        task = remote(address, task={"name": "copy"}, timeout=20.0, tries=1)
        groups = (task.rollout_group(scripted([["a"]]), task.prompt(0), 1) for _ in range(calls))
        try:
            return await asyncio.gather(*groups)
        finally:
            await task.close()

    app = web.Application()
    app.router.add_post("/score", score)
    groups = asyncio.run(served(app, use))
    assert [rollout.reward for group in groups for rollout in group] == [1.0] * calls


def test_a_server_that_is_not_there_costs_samples_and_tells_its_address(scripted):
    async def local() -> list[Rollout]:
        task = remote("http://127.0.0.1:1", task={"name": "copy"}, tries=2)
        return await task.rollout_group(scripted([["a"]]), task.prompt(0), 1)

    (rollout,) = asyncio.run(local())
    assert (rollout.parts, rollout.masked) == ({}, True)
    assert "http://127.0.0.1:1/score: 2 tries" in rollout.failure
    task = remote("http://127.0.0.1:1", tries=2)
    with pytest.raises(RemoteFailed, match="about: 2 tries"):
        asyncio.run(task.rollout_group(scripted([]), task.prompt(0), 1))


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_a_server_is_this_machines_own_on_loopback(host, is_own):
    assert is_local(host) == is_own


def test_an_address_that_is_taken_is_told_in_one_line(tmp_path):
    (tmp_path / "config.yaml").write_text("task: {name: copy}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = [sys.executable, "-m", "streamrl.tasks.serve", str(tmp_path / "config.yaml"), "--port", port]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        with pytest.raises(ValueError, match=f"^--port: 127.0.0.1:{port} cannot be used .*; allowed: a free port"):
            run(web.Application(), "127.0.0.1", int(port))
    assert done.returncode == 2
    assert done.stderr.startswith(f"serve: --port: 127.0.0.1:{port} cannot be used")
    assert done.stderr.count("\n") == 1


def test_a_server_with_a_token_answers_nobody_else(scripted, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    app = application(Config.model_validate(TASKS), token="secret")
    with pytest.raises(RemoteFailed, match="status 401"):
        play(app, "/copy", scripted([]), n=1)
    app = application(Config.model_validate(TASKS), token="secret")
    (rollout,) = play(app, "/copy", scripted([["x", END]]), n=1, token_file=str(tmp_path / "token"))
    assert FAILED not in rollout.parts

"""An environment server in Megatron-RL's shapes, and the agent that asks one: both ends, over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from streamrl.config import Config
from streamrl.config.task import TaskShare
from streamrl.tasks.environment import Rollout
from streamrl.tasks.megatron_rl import EvaluationRequest, RewardOnlyAgent
from streamrl.tasks.megatron_rl.environment_server import Served, agent_of
from streamrl.tasks.megatron_rl.interface_server import InterfaceServer
from streamrl.tasks.megatron_rl.policy import PolicyInterface, Recorder
from streamrl.tasks.megatron_rl.remote_agent import RemoteAgent
from streamrl.tasks.megatron_rl.wire import InferenceServer
from streamrl.tasks.registry import build_task
from streamrl.tasks.serve import application

AGENTS = Path(__file__).with_name("megatron_agents.py")
REMOTE = "streamrl.tasks.megatron_rl.remote_agent:RemoteAgent"
END = "<|im_end|>"
LONGEST = 60.0  # seconds
LOST = """
from streamrl.tasks.arguments import TaskArguments
from streamrl.tasks.environment import Environment, Prompt, Score


class LostArguments(TaskArguments):
    lost: list[str]


class Lost(Environment):
    Arguments = LostArguments

    def __init__(self, arguments, seed, split):
        self.arguments = arguments

    def prompt(self, index):
        return Prompt(index=index, text="?")

    async def score(self, prompt, completion):
        if completion.text in self.arguments.lost:
            raise TimeoutError("no judge answers")
        return Score(reward=float(len(completion.text)))
"""


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """HOST:PORT of a server."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture
def served(tmp_path: Path):
    """`served(agent_type, **args)`: the application of a task file's first entry."""

    def build(agent_type: str, token: str | None = None, **args: Any) -> web.Application:
        file = tmp_path / "tasks.yaml"
        file.write_text(json.dumps([{"agent_type": agent_type, "agent_args": args, "weight": 1.0}]))
        return Served(agent_of(file, seed=1)).application(token)

    return build


def go(work: Any) -> Any:
    async def in_time() -> Any:
        async with asyncio.timeout(LONGEST):
            return await work

    return asyncio.run(in_time())


def remote(address: str, split: str = "train", **args: Any) -> Any:
    share = TaskShare(name=REMOTE, args={"env_server_host_port": address, **args})
    return build_task(share, seed=1, split=split)


async def played(app: web.Application, inference: Any, n: int, split: str = "train", **args: Any) -> list[Rollout]:
    async with listening(app) as address:
        environment = await asyncio.to_thread(remote, address, split, **args)
        try:
            return await environment.rollout_group(inference, environment.prompt(0), n)
        finally:
            await environment.close()


@pytest.mark.parametrize("name", ["Spelled", "Prepared"])
def test_an_agent_plays_at_a_server_and_its_samples_have_the_tokens_that_were_drawn_here(name, served, scripted):
    inference = scripted([["a", "b", END], ["zz", END]])
    rollouts = go(played(served(f"{AGENTS}:{name}"), inference, 2))
    assert {rollout.completion.text for rollout in rollouts} == {"ab", "zz"}
    assert all(rollout.failure is None for rollout in rollouts)
    (drawn,) = [rollout for rollout in rollouts if rollout.completion.text == "ab"]
    assert drawn.completion.logprobs.tolist() == [-1, -2, -3]
    again = scripted([["zz", END], ["zz", END]])
    go(played(served(f"{AGENTS}:{name}"), again, 2))
    assert again.asked[0].tolist() == inference.asked[0].tolist()  # the same prompt index, the same prompt


def test_turns_that_are_played_at_a_server_are_one_sample(served, scripted):
    (rollout,) = go(played(served(f"{AGENTS}:Twice"), scripted([["zz", END], ["yy", END]]), 1))
    assert rollout.parts["turns"] == 2.0
    assert not rollout.completion.loss_mask.all()


def test_a_task_of_one_turn_is_served_as_an_agent(served, scripted):
    rollouts = go(played(served("copy", length=2), scripted([["zz", END], ["yy", END]]), 2, split="probe"))
    assert [rollout.failure for rollout in rollouts] == [None, None]


def test_what_a_server_raises_costs_the_group_and_one_that_is_not_there_is_refused(served, scripted):
    app = served(f"{AGENTS}:Spelled", breaks_on="zz")
    rollouts = go(played(app, scripted([["zz", END], ["yy", END]]), 2))
    assert any("the agent broke" in (rollout.failure or "") for rollout in rollouts)
    with pytest.raises(ValueError, match=r"env_server_host_port: 127\.0\.0\.1:1: .*; allowed: HOST:PORT"):
        remote("127.0.0.1:1")


def test_no_answer_is_trained_that_a_served_tasks_scorer_could_not_judge(served, scripted, tmp_path):
    (tmp_path / "lost.py").write_text(LOST)
    app = served(f"{tmp_path}/lost.py:Lost", lost=["zz"])
    rollouts = go(played(app, scripted([["a", END], ["zz", END], ["bbb", END]]), 3))
    (lost,) = [rollout for rollout in rollouts if rollout.failure is not None]
    assert lost.masked
    assert lost.is_answered
    assert "TimeoutError: no judge answers" in lost.failure
    assert sorted(rollout.reward for rollout in rollouts if rollout is not lost) == [1.0, 3.0]


def test_an_agent_that_raises_ends_the_other_episodes_of_its_group(scripted):
    judging, ended = asyncio.Event(), asyncio.Event()

    class Judges(RewardOnlyAgent):
        async def get_prompt(self, validation: bool) -> Any:
            return "q", {}

        async def get_reward(self, response: str, golden: Any, finish_reason: str) -> float:
            if response == "zz":
                await judging.wait()
                raise RuntimeError("the agent broke")
            judging.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
            return 0.0

    async def ended_at_once() -> bool:
        await played(Served(Judges()).application(None), scripted([["zz", END], ["yy", END]]), 2)
        return ended.is_set()

    assert go(ended_at_once())


def test_a_token_is_asked_for_where_there_is_one(served, scripted, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    with_token = go(
        played(served(f"{AGENTS}:Spelled", "secret"), scripted([["zz", END]]), 1, token_file=str(tmp_path / "token"))
    )
    assert with_token[0].failure is None
    with pytest.raises(Exception, match="status 401"):
        go(played(served(f"{AGENTS}:Spelled", "secret"), scripted([["zz", END]]), 1))


def test_an_evaluation_at_a_server_comes_back_in_its_own_class(served, scripted):
    async def evaluated() -> Any:
        async with listening(served(f"{AGENTS}:Spelled", max_k=2)) as address:
            agent = await asyncio.to_thread(lambda: RemoteAgent(env_server_host_port=address))
            interface = PolicyInterface(Recorder(scripted([["aa", END]] * 6)))
            try:
                return await agent.run_evaluation(EvaluationRequest(inference_interface=interface, num_prompts=2))
            finally:
                await agent.close()

    response = go(evaluated())
    assert response.metrics() == {"pass_at_1": [1.0, 0.0], "pass_at_2": [1.0, 0.0], "greedy_reward": [1.0, 0.5]}


@pytest.mark.parametrize("first", ["client", "session"])
def test_a_request_to_the_policy_ends_with_its_client_and_with_its_session(first, scripted):
    inference = scripted([["ab", END]])
    recorder = Recorder(inference)
    reached, given_up = asyncio.Event(), asyncio.Event()
    body = {"prompt": [{"role": "user", "content": "q"}]}

    async def generate(*args: Any, **options: Any) -> None:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    async def statuses() -> list[int]:
        inference.generate = generate
        server, found = InterfaceServer("127.0.0.1"), []
        await server.start()
        async with aiohttp.ClientSession() as client:
            async with server.serving(PolicyInterface(recorder)) as address:
                url = f"http://{address}/base_generate/"
                call = asyncio.create_task(client.post(url, json=body))
                await reached.wait()
                if first == "client":
                    call.cancel()
                    await given_up.wait()
                    del inference.generate
                    found.append((await client.post(url, json=body)).status)
            if first == "session":
                assert given_up.is_set()
                assert recorder.asked == []
                found.append((await call).status)
            found.append((await client.post(url, json=body)).status)
        await server.close()
        return found

    assert go(statuses()) == ([200, 404] if first == "client" else [410, 404])
    assert len(recorder.asked) == (first == "client")


async def asked(app: web.Application, route: str, **more: Any) -> tuple[int, Any]:
    """What a caller of Megatron-RL's is answered, whose policy says "zz" to everything."""
    policy = web.Application()
    said: list[Any] = []

    async def base_generate(request: web.Request) -> web.Response:
        said.append(await request.json())
        answer = {"role": "assistant", "content": "zz"}
        body = {"response": answer, "raw_text": "q zz", "token_ids": [5, 6, 7], "prompt_length": 1}
        return web.json_response({**body, "logprobs": [-1.0, -2.0], "finish_reason": "stop", "completion_id": "c1"})

    policy.router.add_post("/base_generate/", base_generate)
    async with listening(policy) as address, listening(app) as server, aiohttp.ClientSession() as session:
        interface = {"type_name": "InferenceInterfaceServer", "env_server_host_port": address}
        body = {"generation_args": {"temperature": 0.7}, "inference_interface": interface, "validation": False, **more}
        async with session.post(f"http://{server}/{route}/", json=body) as reply:
            content = await reply.text()
    assert all(each["prompt"][0]["role"] == "user" for each in said)
    assert all(each["generation_args"]["temperature"] in (0.7, 0.0) for each in said)
    return reply.status, json.loads(content) if reply.status == 200 else content


def test_the_server_answers_a_caller_of_the_other_system_in_its_shapes(served):
    app = f"{AGENTS}:Spelled"
    status, groups = go(asked(served(app), "grouped_rollouts", num_groups=2, rollouts_per_group=3))
    assert status == 200
    assert [len(group) for group in groups] == [3, 3]
    rollout = groups[0][0]
    assert rollout["trajectory"] == [[5, 6, 7]]
    assert rollout["generation_mask"] == [[False, True, True]]
    assert (rollout["logprobs"], rollout["completion_ids"]) == ([[-1.0, -2.0]], ["c1"])
    assert (rollout["env_id"], rollout["problem_id"], rollout["rollout_status"]) == ("spelled", "7", "ok")
    status, rollouts = go(asked(served(app), "rollouts", num_rollouts=2))
    assert [each["trajectory"] for each in rollouts] == [[[5, 6, 7]]] * 2
    status, response = go(asked(served(app, max_k=2), "evaluation", num_prompts=3, rank_info=None, validation=True))
    assert response["type_name"] == "PassAtEvaluationResponse"
    assert [result["prompt"] for result in response["results"]] == ["aa", "ab", "ac"]
    assert response["results"][0]["pass_at"] == {"1": 0.0, "2": 0.0}
    status, pairs = go(asked(served(f"{AGENTS}:Shorter"), "contrastive_rollouts", num_rollouts=1))
    assert pairs == [{"chosen_trajectory": ["zz"], "rejected_trajectory": ["zz"]}]
    assert go(asked(served(f"{AGENTS}:Shorter"), "grouped_rollouts", num_groups=1, rollouts_per_group=1))[0] == 404
    assert go(asked(served(app), "grouped_rollouts", num_groups="two", rollouts_per_group=1))[0] == 422
    refused = go(asked(served(app), "rollouts", num_rollouts=1, inference_interface={"type_name": "Other"}))
    assert refused == (422, "type_name: Other is not allowed; allowed: one of InferenceInterfaceClient, "
                            "InferenceInterfaceServer")  # fmt: skip


def test_an_interface_is_known_by_the_name_of_its_class():
    wire = InferenceServer.model_validate({"type_name": "InferenceInterfaceClient", "env_server_host_port": "a:1"})
    assert type(wire.unwrap()).__name__ == "InferenceInterfaceClient"
    assert wire.unwrap().env_server_host_port == "a:1"


@pytest.mark.parametrize("name", ["verifiers", "gymnasium", "openenv", "harbor", "agent"])
def test_a_task_whose_episodes_ask_the_policy_themselves_is_not_served(name):
    config = Config.model_validate({"task": {"name": name}})
    with pytest.raises(
        ValueError, match=rf"^task\.name: {name} cannot be served, .*; allowed: a task of one turn"
    ) as no:
        application(config)
    assert "\n" not in str(no.value)

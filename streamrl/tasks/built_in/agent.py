"""The task `agent`: an agent of OpenAI's or Anthropic's protocol is the environment; what it asks is trained.

    prompt ─▶ session, base URL ─▶ the agent (a command, or a function) ─▶ calls ─▶ one rollout ─▶ the task's scorer

The agent is given its base URL and its question; it calls as often as it likes, within `most_calls` and `timeout`.
Calls that do not extend one another are branches of the rollout, each a sample with the rollout's reward.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import Field, model_validator

from streamrl.config.task import ScoringConfig, TaskShare
from streamrl.tasks.arguments import ARGUMENTS, TaskArguments
from streamrl.tasks.environment import (
    Around,
    Completion,
    Environment,
    Inference,
    Prompt,
    Rollout,
    Score,
    check_reward,
)
from streamrl.tasks.episodes import NotPlayed, begun, together, unbegun
from streamrl.tasks.failures import ScorerLate, ScorerLost, ScorerRaised, describe
from streamrl.tasks.host_pool import HostPool
from streamrl.tasks.host_wire import Call, Task
from streamrl.tasks.openai_server import MODEL, OpenAIServer
from streamrl.tasks.openai_session import Session
from streamrl.tasks.process_pipes import exchange, kill
from streamrl.tasks.starter import BACKWARDS_ARGS, BACKWARDS_FILES, FOLDER, Starter
from streamrl.tasks.user_reward import check_target

OUTPUT = 1 << 16  # characters of a command's standard output that are its answer


# The agent that `streamrl init` writes: one call.
FIRST_AGENT = '''"""The agent: it has a question, asks the policy as often as it likes, and returns its answer."""

import aiohttp


async def agent(base_url: str, question: dict) -> str | None:
    messages = question["messages"] or [{"role": "user", "content": question["text"]}]
    async with aiohttp.ClientSession() as session:
        call = {"model": "policy", "messages": messages}
        async with session.post(f"{base_url}/chat/completions", json=call) as reply:
            return (await reply.json())["choices"][0]["message"]["content"]
'''


class AgentArguments(TaskArguments):
    """Arguments of `agent`."""

    task: TaskShare = Field(description="the task that gives the questions, and judges the agent's answers")
    command: str | None = Field(None, description="command line of the agent; it gets the question on standard input")
    function: str | None = Field(
        None, description="package.module:function or path/file.py:function of the agent, instead of a command"
    )
    processes: int = Field(2, ge=1, description="processes in which the function runs")
    start_timeout: float = Field(120.0, gt=0, description="seconds that such a process may take to be ready")
    timeout: float = Field(120.0, gt=0, description="seconds that the agent may take for one question")
    most_calls: int = Field(16, ge=1, description="calls of one session")
    parallel: int = Field(64, ge=1, description="agents at once")
    host: str = Field("127.0.0.1", description="address at which the endpoint listens")
    port: int = Field(0, ge=0, le=65535, description="its port; 0: a free one")

    @model_validator(mode="after")
    def _is_one_agent(self) -> AgentArguments:
        if (self.command is None) == (self.function is None):
            raise ValueError("command: either a command or a function is needed; allowed: one of the two")
        return self


class AgentFailed(RuntimeError):
    """An agent that did not come to its end; its text says how."""


class Agent(Around):
    """Reward: what the task's scorer gives to the agent's answer.

    An agent that fails, or is not done in time, costs its sample the reward; the tokens that it asked for stay.
    One that asks nothing gives no sample.
    """

    Arguments = AgentArguments
    starter = Starter(
        args={"task": {"name": "jsonl", "args": BACKWARDS_ARGS}, "function": f"{FOLDER}/my_agent.py:agent"},
        files={**BACKWARDS_FILES, "my_agent.py": FIRST_AGENT},
    )
    has_turns = True

    def __init__(self, arguments: AgentArguments, task: Environment, seed: int, split: str) -> None:
        """Raises ValueError for a judge of groups, for a task that keeps its prompts to itself, and for a function that
        cannot be loaded, which is tried in a process of its own.
        """
        if task.asks_itself:
            raise ValueError(
                f"{ARGUMENTS}.task.name: {arguments.task.name} has its prompts only where it asks the policy itself; "
                "allowed: a task that has them (remote does with a local task)"
            )
        self._arguments = arguments
        self._judge_by(task, arguments.task.name)
        self._run = self._command if arguments.function is None else self._function
        self._pool = None if arguments.function is None else _pool(arguments, arguments.function)
        self._places = asyncio.Semaphore(arguments.parallel)
        self._server: OpenAIServer | None = None
        self._starting = asyncio.Lock()

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        return await self._task.score(prompt, completion)

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        """Raises NotPlayed where no agent asks anything."""
        server = await self._endpoint()
        if self._pool is not None:
            await self._pool.about()  # a function of which no process can be made ready costs no sample
        return begun(await together(self._play(server, inference, prompt) for _ in range(n)))

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        if self._server is not None:
            await self._server.close()
            self._server = None
        await self._task.close()

    async def _function(self, base_url: str, question: dict[str, Any], begun: Callable[[], None]) -> str | None:
        """Call the user's function. A process that it blocks for longer than the agent's time is ended."""
        assert self._pool is not None
        call = Call(method="function", arguments=[base_url, question])
        try:
            done = await self._pool.call(call, again=False, begun=begun)
        except ScorerLate as late:
            raise AgentFailed(str(late)) from None
        except ScorerLost as lost:  # maybe by another call, whatever the task says of its own scorer
            raise ScorerRaised(describe(lost), masked=True) from lost
        return None if done.value is None else str(done.value)

    async def _endpoint(self) -> OpenAIServer:
        async with self._starting:
            if self._server is None:
                server = OpenAIServer(self._arguments.host, self._arguments.port)
                await server.start()
                self._server = server
            return self._server

    async def _play(self, server: OpenAIServer, inference: Inference, prompt: Prompt) -> Rollout:
        session = Session(
            inference,
            prompt,
            most_calls=self._arguments.most_calls,
            max_branches=self.max_branches,
            parsers=self.parsers,
        )
        answer: str | None = None
        failure: Exception | None = None
        async with self._places, server.serving(session) as base_url:
            try:
                async with asyncio.timeout(None) as limit:
                    answer = await self._run(base_url, _question(prompt), partial(self._begin, limit))
            except TimeoutError:
                failure = AgentFailed(f"not done in {self._arguments.timeout:g} seconds")
            except Exception as error:  # the policy for foreign agents: count, log, go on
                failure = error
        session.check()
        completion = session.completion
        if completion is None:
            none = unbegun(inference, prompt, session.missing)
            return self.unscored(prompt, none, failure or NotPlayed("the agent asked the policy nothing"))
        if session.is_unanswered:
            failure = failure or AgentFailed("a call was not answered")
        if (failure := session.exceeded or failure) is not None:
            return self.unscored(prompt, completion, failure, session.branches)
        return await self._judged(prompt, session, completion, answer)

    async def _judged(self, prompt: Prompt, session: Session, completion: Completion, answer: str | None) -> Rollout:
        last = session.turns[-1]
        try:
            score = await self._task.score(prompt, last if answer is None else replace(last, text=answer))
            check_reward(score)
        except Exception as error:  # the policy for foreign scorers: count, log, go on
            return self.unscored(prompt, completion, error, session.branches)
        parts = {**score.parts, "calls": float(len(session.turns))}
        return Rollout(completion=completion, reward=score.reward, parts=parts, branches=session.branches)

    def _begin(self, limit: asyncio.Timeout) -> None:
        """The agent's time begins: the start of a function's process is none of it."""
        limit.reschedule(asyncio.get_running_loop().time() + self._arguments.timeout)

    async def _command(self, base_url: str, question: dict[str, Any], begun: Callable[[], None]) -> str | None:
        """Run the agent's command to its end; the process group is killed when it has no more time."""
        begun()
        process = await asyncio.create_subprocess_exec(
            *shlex.split(self._arguments.command or ""),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **_endpoint_variables(base_url)},
            start_new_session=True,
        )
        try:
            output = await exchange(process, json.dumps(question).encode(), 4 * OUTPUT)
            await process.wait()
        finally:
            await kill(process)
        if process.returncode != 0:
            raise AgentFailed(f"the agent's command ended with code {process.returncode}")
        return output.decode(errors="replace").strip()[:OUTPUT] or None


def _question(prompt: Prompt) -> dict[str, Any]:
    """What an agent is given: never the right answer."""
    return {"index": prompt.index, "text": prompt.text, "messages": prompt.messages, "images": prompt.images}


def _endpoint_variables(base_url: str) -> dict[str, str]:
    """Where the clients of both protocols look for it; Anthropic's adds the `/v1` itself."""
    openai = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}
    root = base_url.removesuffix("/v1")
    return {**openai, "ANTHROPIC_BASE_URL": root, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": MODEL}


def _pool(arguments: AgentArguments, function: str) -> HostPool:
    """The processes of a function, which start with its first call. Raises ValueError where it cannot be loaded."""
    try:
        check_target(function, arguments.start_timeout)
    except ValueError as error:
        raise ValueError(
            f"{ARGUMENTS}.function: {function!r} cannot be loaded ({error}); allowed: package.module:function or "
            "path/file.py:function"
        ) from None
    settings = ScoringConfig(
        processes=arguments.processes, timeout=arguments.timeout, start_timeout=arguments.start_timeout
    )
    task = Task(function=function, timeout=arguments.timeout, limit=f"{ARGUMENTS}.timeout")
    return HostPool(task, function.rpartition(":")[2], settings)

"""The task `remote`: an environment, or a reward model, in another process or on another machine, over HTTP.

What is not answered in time is asked again, a few times; then it costs the samples that wait for it, never the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from pydantic import Field

from streamrl.config.task import TaskShare
from streamrl.tasks.arguments import TaskArguments
from streamrl.tasks.environment import (
    Around,
    Completion,
    Environment,
    Inference,
    Prompt,
    Rollout,
    Score,
)
from streamrl.tasks.failures import INFRASTRUCTURE, ScorerRaised
from streamrl.tasks.http_session import HttpSession
from streamrl.tasks.reachable import bearer
from streamrl.tasks.remote_protocol import (
    About,
    AskObservation,
    AskScores,
    Judged,
    Observed,
    RemotePrompt,
    RemoteScore,
    Turn,
)
from streamrl.tasks.starter import Starter
from streamrl.tasks.turns import Observation, TurnByTurn

Reply = TypeVar("Reply")


class RemoteArguments(TaskArguments):
    """Arguments of `remote`."""

    url: str = Field(pattern=r"^https?://", description="address of the task, such as http://host:7000/sums")
    task: TaskShare | None = Field(None, description="a local task that gives the prompts; null: the remote one does")
    timeout: float = Field(30.0, gt=0, description="seconds that one call may take")
    tries: int = Field(3, ge=1, description="times that a call is made before its samples have failed")
    pause: float = Field(0.5, ge=0, description="seconds before the second try; doubled before each further one")
    token_file: Path | None = Field(None, description="file with the bearer token that the server asks for")


class RemoteFailed(RuntimeError):
    """A call that was not answered as it should, however often it was made."""


class RemoteRefused(RemoteFailed):
    """A call that the server does not take, or answers with something else: no further try mends that."""


class Remote(TurnByTurn, Around):
    """Prompts, observations and rewards from a server (`python -m streamrl.tasks.serve`), or rewards alone."""

    Arguments = RemoteArguments
    judges_groups = False  # the server is asked when it is to judge one answer
    starter = Starter(args={"url": "http://127.0.0.1:7000/copy"})

    def __init__(self, arguments: RemoteArguments, local: Environment | None, seed: int, split: str) -> None:
        """`local` gives the prompts where the server is a reward model."""
        self._local = local
        self.asks_itself = local is None
        if local is not None:
            self._follow(local)
        self.infrastructure = (*INFRASTRUCTURE, RemoteFailed)
        self._split = split
        self._caller = _Caller(arguments)
        self._about: About | None = None

    def prompt(self, index: int) -> Prompt:
        """A local prompt; of a remote one its index alone, the rest comes when it is asked."""
        if self._local is not None:
            return self._local.prompt(index)
        return Prompt(index=index, text=f"prompt {index} of {self._caller.url}")

    async def fetch(self, index: int) -> Prompt:
        return self.prompt(index) if self._local is None else await self._local.fetch(index)

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        """Raises RemoteFailed where the server gives no prompt."""
        if self._local is not None:
            return await Environment.rollout_group(self, inference, prompt, n)
        about = await self._said()
        self.lowest_reward = about.lowest_reward
        prompt = await self._fetched(prompt.index)
        if about.max_turns == 1:
            return await Environment.rollout_group(self, inference, prompt, n)
        self.max_turns = about.max_turns
        return await super().rollout_group(inference, prompt, n)

    async def observation(self, prompt: Prompt, turns: Sequence[Completion]) -> Observation | None:
        asked = AskObservation(RemotePrompt.of(prompt), _turns(turns))
        observed = await self._caller.call("observation", asked, Observed)
        return observed.text if observed.messages is None else observed.messages

    async def trajectory_reward(self, prompt: Prompt, turns: Sequence[Completion]) -> Score:
        """Raises ValueError where the server judges the answers of a group together."""
        if (await self._said()).judges_groups:
            raise ValueError(
                f"task.args.url: {self._caller.url} judges the answers of a group together, and is asked for the score "
                "of one; allowed: a task that judges each answer alone"
            )
        (score,) = await self._judged(prompt, [_turns(turns)])
        return score.checked()

    async def score_all(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Rollout]:
        """All answers of a group in one call, so that the server may score them against each other."""
        try:
            scores = await self._judged(prompt, [_turns([completion]) for completion in completions])
        except RemoteFailed as error:
            return [self.unscored(prompt, completion, error) for completion in completions]
        return [self._rollout_of(prompt, each, score) for each, score in zip(completions, scores, strict=True)]

    def _rollout_of(self, prompt: Prompt, completion: Completion, score: RemoteScore) -> Rollout:
        try:
            judged = score.checked()
        except (ScorerRaised, ValueError) as error:
            return self.unscored(prompt, completion, error)
        return Rollout(completion=completion, reward=judged.reward, parts=judged.parts)

    async def close(self) -> None:
        await self._caller.close()
        if self._local is not None:
            await self._local.close()

    async def _said(self) -> About:
        """What the server says of itself; a reward model may say nothing. Raises RemoteFailed."""
        if self._about is None:
            try:
                self._about = await self._caller.call("about", None, About)
            except RemoteRefused:
                if self._local is None:
                    raise
                self._about = About()
        return self._about

    async def _fetched(self, index: int) -> Prompt:
        reply = await self._caller.call("prompt", {"index": index, "split": self._split}, RemotePrompt)
        return msgspec.structs.replace(reply, index=index).prompt()

    async def _judged(self, prompt: Prompt, answers: Sequence[tuple[Turn, ...]]) -> tuple[RemoteScore, ...]:
        asked = AskScores(RemotePrompt.of(prompt), tuple(answers))
        scores = (await self._caller.call("score", asked, Judged)).scores
        if len(scores) != len(answers):
            raise RemoteFailed(f"{self._caller.url}/score: {len(scores)} scores for {len(answers)} answers")
        return scores


class _Caller:
    """HTTP calls with deadlines and retries."""

    def __init__(self, arguments: RemoteArguments) -> None:
        self.url = arguments.url.rstrip("/")
        self._arguments = arguments
        self._http = HttpSession(bearer(arguments.token_file))

    async def call(self, name: str, body: Any, reply: type[Reply]) -> Reply:
        """The typed reply. Raises RemoteFailed after the last try, and RemoteRefused at once for what no try mends."""
        pause, failure = self._arguments.pause, ""
        for left in reversed(range(self._arguments.tries)):
            try:
                return msgspec.json.decode(await self._once(name, body), type=reply)
            except msgspec.DecodeError as error:
                raise RemoteRefused(f"{self.url}/{name}: not a reply: {error}") from None
            except (aiohttp.ClientError, TimeoutError) as error:
                failure = f"{type(error).__name__}: {error}".rstrip(": ")
            if left:
                await asyncio.sleep(pause)
                pause *= 2
        raise RemoteFailed(f"{self.url}/{name}: {self._arguments.tries} tries: {failure}")

    async def close(self) -> None:
        await self._http.close()

    async def _once(self, name: str, body: Any) -> bytes:
        """One call. Raises RemoteRefused for a status that says that the call itself is wrong."""
        method, data = ("GET", None) if body is None else ("POST", msgspec.json.encode(body))
        async with (
            asyncio.timeout(self._arguments.timeout),
            self._http.session.request(method, f"{self.url}/{name}", data=data) as response,
        ):
            content = await response.read()
            if 400 <= response.status < 500 or response.status == HTTPStatus.NOT_IMPLEMENTED:
                raise RemoteRefused(
                    f"{self.url}/{name}: status {response.status}: {content[:200].decode(errors='replace')}"
                )
            response.raise_for_status()
            return content


def _turns(completions: Sequence[Completion]) -> tuple[Turn, ...]:
    return tuple(Turn.of(completion) for completion in completions)

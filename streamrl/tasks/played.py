"""Environments of foreign libraries: they play by themselves, and the policy answers them as a model of OpenAI's.

    worker ── /play, n base URLs ──▶ adapter (its own virtual environment) ── calls ──▶ n sessions ─▶ n rollouts
           ◀── rewards and parts ──

The adapter sees texts. The tokens that were drawn, their log-probs and the mask stay with the sessions here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import aiohttp
import msgspec
from pydantic import Field, model_validator

from streamrl.tasks.adapter_process import AdapterProcess
from streamrl.tasks.arguments import ARGUMENTS, OnDisk, TaskArguments
from streamrl.tasks.environment import Completion, Environment, Inference, Prompt, Rollout, Score
from streamrl.tasks.episodes import NotPlayed, begun, unbegun
from streamrl.tasks.failures import INFRASTRUCTURE, ScorerRaised
from streamrl.tasks.http_session import HttpSession
from streamrl.tasks.openai_server import OpenAIServer
from streamrl.tasks.openai_session import Session
from streamrl.tasks.played_protocol import AboutPlayer, AskPlay
from streamrl.tasks.reachable import bearer, server_reply
from streamrl.tasks.remote_protocol import Judged, RemoteScore

# Seconds beyond an episode's own deadline after which an adapter that says nothing is given up.
REPLY_TIMEOUT = 30.0


class PlayedArguments(TaskArguments):
    """Arguments of every environment that an adapter plays."""

    environment: Annotated[str, OnDisk("code")] = Field("", description="which one: a name, or path/file.py:NAME")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    python: Path | None = Field(
        None, description="interpreter of the virtual environment that has the library; the adapter starts in it"
    )
    url: str | None = Field(
        None, pattern=r"^https?://", description="address of an adapter that runs already, instead of python"
    )
    token_file: Path | None = Field(None, description="file with the bearer token that such an adapter asks for")
    start_timeout: float = Field(120.0, gt=0, description="seconds that the environment may take to load")
    timeout: float = Field(300.0, gt=0, description="seconds that an episode may take, waits for the policy included")
    most_calls: int = Field(64, ge=1, description="answers of the policy in one episode")
    parallel: int = Field(64, ge=1, description="groups at once")
    host: str = Field("127.0.0.1", description="address at which the endpoint listens")
    port: int = Field(0, ge=0, le=65535, description="its port; 0: a free one")

    @model_validator(mode="after")
    def _is_one_adapter(self) -> PlayedArguments:
        if (self.python is None) == (self.url is None):
            raise ValueError("python: either python or url is needed; allowed: one of the two")
        if (self.python is None) != (not self.environment):
            raise ValueError("environment: is needed with python, and given to the adapter itself with url")
        return self


class AdapterFailed(ConnectionError):
    """The adapter did not reply as it should: that says nothing of an answer."""


class Played(Environment):
    """Rewards and their parts are the library's own. A rollout is all that one episode asks of the policy."""

    Arguments = PlayedArguments
    has_turns = True
    asks_itself = True
    library: ClassVar[str]

    def __init__(self, arguments: PlayedArguments, seed: int, split: str) -> None:
        """Raises ValueError, with one line, for what the adapter refuses, and where it is not there."""
        self.infrastructure = INFRASTRUCTURE
        self._arguments = arguments
        self._split: Literal["train", "probe"] = "probe" if split == "probe" else "train"
        self._places = asyncio.Semaphore(arguments.parallel)
        self._server = OpenAIServer(arguments.host, arguments.port)
        self._url = (arguments.url or "").rstrip("/")
        headers = bearer(arguments.token_file)
        self._http = HttpSession(headers)
        self._adapter: AdapterProcess | None = None
        if arguments.python is None:
            about = server_reply(f"{self._url}/about", headers, "adapter", AboutPlayer)
        else:
            words = self._words(arguments, seed)
            self._adapter = AdapterProcess(arguments.python, words, start_timeout=arguments.start_timeout)
            self._adapter.start()
            about = self._adapter.about
        self._grouped = about.grouped
        self.size = about.probes if split == "probe" else about.size
        if self.size == 0:
            raise ValueError(f"{ARGUMENTS}.held_out: {arguments.held_out} leaves the split {split!r} without a prompt")

    @classmethod
    def settings(cls, arguments: Any) -> dict[str, Any]:
        """What the adapter needs to know besides."""
        return {}

    @classmethod
    def _words(cls, arguments: PlayedArguments, seed: int) -> list[str]:
        """The words of the adapter's command line."""
        options, settings = json.dumps(arguments.options), json.dumps(cls.settings(arguments))
        chosen = ["--options", options, "--settings", settings, "--seed", str(seed)]
        return [cls.library, arguments.environment, *chosen, "--held-out", str(arguments.held_out)]

    def prompt(self, index: int) -> Prompt:
        """Its index alone: what is asked is the environment's."""
        return Prompt(index=index, text=f"prompt {index} of {self.library}")

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Raises TypeError: only whole episodes have a reward."""
        raise TypeError(f"{self.library}: an answer without its episode has no reward")

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        """Raises NotPlayed where no episode asks anything."""
        async with self._places:
            await self._server.start()
            limits = {"most_calls": self._arguments.most_calls, "max_branches": self.max_branches}
            sessions = [Session(inference, prompt, parsers=self.parsers, **limits) for _ in range(n)]
            async with contextlib.AsyncExitStack() as opened:
                urls = [await opened.enter_async_context(self._server.serving(session)) for session in sessions]
                scores = await self._scores(prompt.index, urls)
        for session in sessions:
            session.check()
        judged = zip(sessions, scores, strict=True)
        return begun([self._rollout_of(inference, prompt, session, score) for session, score in judged])

    async def close(self) -> None:
        if self._adapter is not None:
            await self._adapter.close()
        await self._http.close()
        await self._server.close()

    async def _scores(self, index: int, urls: Sequence[str]) -> list[RemoteScore | Exception]:
        """For each episode its score, or why there is none."""
        try:
            address = await self._address()
            calls = [urls] if self._grouped else [[url] for url in urls]
            played = await asyncio.gather(*(self._play(address, index, some) for some in calls))
        except Exception as error:  # the policy for foreign environments: count, log, go on
            return [error] * len(urls)
        return [score for some in played for score in some]

    async def _play(self, address: str, index: int, urls: Sequence[str]) -> Sequence[RemoteScore | Exception]:
        asked = AskPlay(index, self._split, tuple(urls), self._arguments.timeout)
        try:
            reply = await self._post(f"{address}/play", asked, self._arguments.timeout + REPLY_TIMEOUT)
            scores = msgspec.json.decode(reply, type=Judged).scores
        except (msgspec.DecodeError, aiohttp.ClientError, TimeoutError) as error:
            text = f"{address}/play: {type(error).__name__}: {error}".rstrip(": ")
            return [AdapterFailed(text)] * len(urls)
        if len(scores) != len(urls):
            return [AdapterFailed(f"{address}/play: {len(scores)} scores for {len(urls)} episodes")] * len(urls)
        return scores

    def _rollout_of(
        self, inference: Inference, prompt: Prompt, session: Session, score: RemoteScore | Exception
    ) -> Rollout:
        judged, failure = Score(reward=0.0), score if isinstance(score, Exception) else None
        if isinstance(score, RemoteScore):
            try:
                judged = score.checked()
            except (ScorerRaised, ValueError) as error:
                failure = error
        completion = session.completion
        if completion is None:
            none = unbegun(inference, prompt, session.missing)
            return self.unscored(prompt, none, failure or NotPlayed("the environment asked the policy nothing"))
        if failure is None and session.is_unanswered:
            failure = NotPlayed("a call was not answered")
        if (failure := session.exceeded or failure) is not None:
            return self.unscored(prompt, completion, failure, session.branches)
        parts = {**judged.parts, "calls": float(len(session.turns))}
        return Rollout(completion=completion, reward=judged.reward, parts=parts, branches=session.branches)

    async def _address(self) -> str:
        if self._adapter is not None:
            return await self._adapter.address()
        return self._url

    async def _post(self, url: str, body: AskPlay, timeout: float) -> bytes:
        """Raises aiohttp.ClientError, TimeoutError."""
        limit = aiohttp.ClientTimeout(total=timeout)
        async with self._http.session.post(url, data=msgspec.json.encode(body), timeout=limit) as response:
            content = await response.read()
            if response.status != 200:
                text = content[:200].decode(errors="replace")
                raise aiohttp.ClientPayloadError(f"status {response.status}: {text}")
            return content

"""The task `openenv`: an OpenEnv server, attached to by its address.

    reset ─▶ observation ─▶ policy ─▶ step(action) ─▶ observation ─▶ policy ─▶ ... ─▶ done or max_turns

Each sample has a WebSocket of its own (`URL/ws`), which is a session of the server. Reward: the sum of its steps'.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from pydantic import Field

from streamrl.tasks.arguments import ARGUMENTS, TaskArguments
from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import (
    Completion,
    Environment,
    Inference,
    Message,
    Prompt,
    Rollout,
    Score,
    check_reward,
)
from streamrl.tasks.episodes import begun, together, unbegun
from streamrl.tasks.failures import INFRASTRUCTURE
from streamrl.tasks.http_session import HttpSession
from streamrl.tasks.order import episode_seed
from streamrl.tasks.reachable import bearer, server_reply
from streamrl.tasks.turns import TURNS

LARGEST = 16 << 20  # bytes of an observation
FULL = "CAPACITY_REACHED"  # the server's word for: every session is taken
FULL_PAUSE = 0.5  # seconds until a session is asked for again

TEXT = "{text}"  # in an action: what the policy said


class OpenEnvArguments(TaskArguments):
    """Arguments of `openenv`."""

    url: str = Field(pattern=r"^https?://", description="address of the server, such as http://host:8000")
    action: str | dict[str, Any] | None = Field(
        None,
        description="field of the action that is the policy's text, or a whole action with {text} in its place; null: "
        "the one text that the action needs",
    )
    observation: str | None = Field(
        None,
        description="field of the observation that the policy reads, dots for fields within; null: the one text in it",
    )
    reset: dict[str, Any] = Field(default_factory=dict, description="what is sent with reset, besides a seed")
    max_turns: int = Field(16, ge=1, description="steps of an episode")
    chat: bool = Field(True, description="ask through the model's chat template; false: plain text")
    system: str | None = Field(None, description="what comes before the first observation; null: nothing")
    timeout: float = Field(60.0, gt=0, description="seconds for one reset or step, or for a free session")
    parallel: int = Field(8, ge=1, description="sessions at once, of one worker")
    token_file: Path | None = Field(None, description="file with the bearer token that the server asks for")


class Schema(msgspec.Struct, frozen=True):
    """What the server says of its actions and observations: JSON schemas."""

    action: dict[str, Any] = {}
    observation: dict[str, Any] = {}


class Observed(msgspec.Struct, frozen=True):
    """The data of a reply to reset or step."""

    observation: dict[str, Any]
    reward: float | bool | None = None
    done: bool = False


class ServerError(msgspec.Struct, frozen=True):
    message: str = ""
    code: str = ""


class SessionLost(ConnectionError):
    """The server, or its network, failed: that says nothing of an answer."""


class StepRefused(ValueError):
    """The server did not take the action, or raised on it."""


class OpenEnv(Environment):
    """Every sample of a group begins with the same seed."""

    Arguments = OpenEnvArguments
    has_turns = True
    asks_itself = True

    def __init__(self, arguments: OpenEnvArguments, seed: int, split: str) -> None:
        """Raises ValueError, with one line, where no server is there, or its actions are no text."""
        self.infrastructure = INFRASTRUCTURE
        self._arguments = arguments
        self._seed = seed
        self._split = split
        self._url = arguments.url.rstrip("/")
        headers = bearer(arguments.token_file)
        self._http = HttpSession(headers)
        schema = server_reply(f"{self._url}/schema", headers, "OpenEnv server", Schema)
        self._action = _action(arguments.action, schema.action)
        self._field = _field(arguments.observation, schema.observation)
        self._places = asyncio.Semaphore(arguments.parallel)

    def prompt(self, index: int) -> Prompt:
        """Its index alone: what is asked is the environment's."""
        return Prompt(index=index, text=f"prompt {index} of {self._url}")

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Raises TypeError: only whole episodes have a reward."""
        raise TypeError("openenv: an answer without its episode has no reward")

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        """Raises NotPlayed where the server begins no episode."""
        return begun(await together(self._play(self._http.session, inference, prompt) for _ in range(n)))

    async def close(self) -> None:
        await self._http.close()

    async def _play(self, session: aiohttp.ClientSession, inference: Inference, prompt: Prompt) -> Rollout:
        """One sample. Errors of `inference` propagate, those of the server cost the reward, or the sample."""
        episode = Episode(session, f"{self._url}/ws", self._arguments.timeout)
        conversation: Conversation | None = None
        async with self._places:
            try:
                observed = await episode.begin(
                    {"seed": episode_seed(self._seed, self._split, prompt.index), **self._arguments.reset}
                )
                conversation = Conversation(inference, self._asked(prompt.index, self._shown(observed)))
                return await self._turns(episode, conversation)
            except (SessionLost, TimeoutError, ValueError) as error:  # of the server, or of the template that shows it
                given = conversation.completion if conversation is not None and conversation.turns else None
                return self.unscored(prompt, given or unbegun(inference, prompt), error)
            finally:
                await episode.close()

    async def _turns(self, episode: Episode, conversation: Conversation) -> Rollout:
        reward = 0.0
        while True:
            turn = await conversation.generate()
            if conversation.ended:
                return Rollout(completion=conversation.completion, reward=0.0)
            observed = await episode.ask("step", _filled(self._action, turn.text))
            reward += float(observed.reward or 0.0)
            if observed.done or len(conversation.turns) == self._arguments.max_turns:
                break
            shown = self._shown(observed)
            conversation.add([Message(role="user", content=shown)] if self._arguments.chat else shown)
        score = Score(reward=reward, parts={TURNS: float(len(conversation.turns))})
        try:
            check_reward(score)
        except ValueError as error:
            raise StepRefused(str(error)) from None
        return Rollout(completion=conversation.completion, reward=score.reward, parts=score.parts)

    def _asked(self, index: int, observation: str) -> Prompt:
        system = self._arguments.system
        if not self._arguments.chat:
            return Prompt(index=index, text=f"{system or ''}{observation}")
        before = [Message(role="system", content=system)] if system else []
        return Prompt(index=index, messages=(*before, Message(role="user", content=observation)))

    def _shown(self, observed: Observed) -> str:
        """The field, and where an observation has none, as after an error, all of it."""
        found: Any = observed.observation
        for name in self._field.split(".") if self._field else ():
            if not isinstance(found, dict) or name not in found:
                found = observed.observation
                break
            found = found[name]
        return found if isinstance(found, str) else msgspec.json.encode(found).decode()


class Episode:
    """One session of the server. `begin` it, `close` it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, timeout: float) -> None:
        self._session = session
        self._url = url
        self._timeout = timeout
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        # One is always waited for, however long the policy takes: that answers the server's pings.
        self._reply: asyncio.Task[aiohttp.WSMessage] | None = None

    async def begin(self, options: dict[str, Any]) -> Observed:
        """The first observation, of a session that is waited for. Raises SessionLost, StepRefused, TimeoutError."""
        async with asyncio.timeout(self._timeout):
            while True:
                try:
                    self._socket = await self._session.ws_connect(self._url, max_msg_size=LARGEST)
                    self._reply = asyncio.create_task(self._socket.receive())
                    return await self.ask("reset", options)
                except aiohttp.ClientError as error:
                    raise SessionLost(f"{self._url}: {error}") from None
                except SessionLost as error:
                    if FULL not in str(error):
                        raise
                await self.close()
                await asyncio.sleep(FULL_PAUSE)

    async def ask(self, kind: str, data: dict[str, Any]) -> Observed:
        """Raises SessionLost, StepRefused, TimeoutError."""
        assert self._socket is not None
        assert self._reply is not None
        async with asyncio.timeout(self._timeout):
            try:
                await self._socket.send_str(msgspec.json.encode({"type": kind, "data": data}).decode())
                reply = await self._reply
            except (aiohttp.ClientError, ConnectionError) as error:
                raise SessionLost(f"{self._url}: {error}") from None
        if reply.type is not aiohttp.WSMsgType.TEXT:
            raise SessionLost(f"{self._url}: the session was closed ({reply.type.name})")
        self._reply = asyncio.create_task(self._socket.receive())
        return _read(self._url, kind, reply.data)

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.cancel()
            await asyncio.wait((reply,))
        if socket is not None:
            await socket.close()


def _read(url: str, kind: str, text: str) -> Observed:
    """Raises SessionLost, StepRefused."""
    try:
        reply = msgspec.json.decode(text)
        if reply["type"] == "observation":
            return msgspec.convert(reply["data"], Observed)
        said = msgspec.convert(reply["data"], ServerError)
    except (msgspec.DecodeError, msgspec.ValidationError, KeyError, TypeError) as error:
        raise SessionLost(f"{url}: not a reply: {text[:200]!r} ({error})") from None
    line = f"{kind}: {said.code}: {said.message}"
    raise SessionLost(line) if said.code in (FULL, "SESSION_ERROR", "FACTORY_ERROR") else StepRefused(line)


def _action(chosen: str | dict[str, Any] | None, schema: dict[str, Any]) -> dict[str, Any]:
    """An action with TEXT in its place. Raises ValueError, with one line, where that is not clear."""
    if isinstance(chosen, dict):
        if TEXT not in msgspec.json.encode(chosen).decode():
            raise ValueError(f"{ARGUMENTS}.action: {chosen} has no {TEXT}; allowed: the policy's text in one place")
        return chosen
    fields = schema.get("properties", {})
    name = chosen or _only_text({"properties": {key: fields.get(key, {}) for key in schema.get("required", ())}})
    if name is None or name not in fields or len(set(schema.get("required", ())) - {name}) > 0:
        raise ValueError(
            f"{ARGUMENTS}.action: {chosen or 'null'} is not allowed; allowed: one of {', '.join(fields) or 'none'}, "
            f"or a whole action with {TEXT} in it"
        )
    return {name: TEXT}


def _field(chosen: str | None, schema: dict[str, Any]) -> str | None:
    """The field of an observation that is shown. Raises ValueError, with one line, for what no observation has."""
    fields = schema.get("properties", {})
    if chosen is not None and fields and chosen.partition(".")[0] not in fields:
        raise ValueError(f"{ARGUMENTS}.observation: {chosen} is not allowed; allowed: one of {', '.join(fields)}")
    return chosen or _only_text(schema)


def _only_text(schema: dict[str, Any]) -> str | None:
    """The one field that is text; None where there is none, or more than one."""
    texts = [name for name, field in schema.get("properties", {}).items() if field.get("type") == "string"]
    return texts[0] if len(texts) == 1 else None


def _filled(action: Any, text: str) -> Any:
    """The action with the policy's text in its place."""
    if isinstance(action, dict):
        return {name: _filled(value, text) for name, value in action.items()}
    if isinstance(action, list):
        return [_filled(value, text) for value in action]
    return action.replace(TEXT, text) if isinstance(action, str) else action

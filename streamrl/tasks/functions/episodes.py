"""The same rows, played over several turns: with typed functions as tools, or in an environment of the user's.

    prompt + reset(**row) ─▶ turn ─▶ step(text), or the answers to its tool calls ─▶ turn ─▶ ... ─▶ rewards

An environment is a class without arguments. It has `reset(**row)`, which may return a first observation, and either
`step(text)` as Gymnasium has it, or public methods, which are tools, and `get_reward()`, as TRL has them. Any of these
may be `async`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import EXACT, Inference, Message, Prompt, Rollout, Score
from streamrl.tasks.episodes import begun, together, unbegun
from streamrl.tasks.failures import describe
from streamrl.tasks.functions.rewards import Answer
from streamrl.tasks.functions.task import FunctionArguments, FunctionTask
from streamrl.tasks.functions.tools import ToolFunction
from streamrl.tasks.tool_calls import FunctionCall, ToolCall, named_calls
from streamrl.tasks.turns import TURNS, Observation

log = logging.getLogger(__name__)

# The reward part that the environment itself gave, and the one that counts calls of tools.
ENVIRONMENT, CALLS = "environment", "tool_calls"

# Methods of an environment that are no tools.
OWN_METHODS = frozenset({"reset", "step", "get_reward", "close"})


class Episodes(FunctionTask):
    """Reward: of the steps, of `get_reward`, and the weighted sum of what the reward functions say."""

    has_turns = True
    judges_groups = False  # a function of a batch is given one episode
    tools: ClassVar[Mapping[str, ToolFunction]] = {}
    environment: ClassVar[Any] = None  # what makes one, without arguments; None: there is none

    def __init__(self, arguments: FunctionArguments, seed: int, split: str) -> None:
        """Raises ValueError where an environment has neither `reset` nor something to be done in it."""
        super().__init__(arguments, seed, split)
        if self.environment is not None:
            check_environment(type(self).environment, self.tools)

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        """Raises NotPlayed where no episode begins."""
        return begun(await together(self._play(inference, prompt) for _ in range(n)))

    async def _play(self, inference: Inference, prompt: Prompt) -> Rollout:
        """One sample. Errors of `inference` propagate, those that the user's code leads to cost the reward."""
        episode = Episode(self.tools, type(self).environment)
        conversation: Conversation | None = None
        try:
            asked = await episode.begin(prompt)
            with _of_user(ValueError):  # an observation that the chat template refuses
                conversation = _conversation(inference, asked, episode.tools)
            question = len(conversation.messages)  # of the words that tell of tools, too
            while True:
                turn = await conversation.generate()
                if conversation.ended:
                    return Rollout(completion=conversation.completion, reward=0.0)
                said = await episode.observe(turn.text, chat=asked.messages is not None)
                if said is None or len(conversation.turns) == self.arguments.max_turns:
                    break
                with _of_user(ValueError):
                    conversation.add(said)
            return await self._judge_episode(asked, conversation, episode, conversation.messages[question:])
        except UserCodeFailed as failed:
            done = unbegun(inference, prompt) if conversation is None else conversation.completion
            return self.unscored(prompt, done, failed.error)
        finally:
            await episode.end()

    async def _judge_episode(
        self, prompt: Prompt, conversation: Conversation, episode: Episode, followed: Sequence[Message]
    ) -> Rollout:
        """`followed`: the messages behind the question."""
        completion, last = conversation.completion, conversation.turns[-1]
        answer = Answer(
            text=last.text,
            completion=completion.text if prompt.messages is None else list(followed),
            completion_ids=completion.output_ids.tolist(),
            finish_reason=completion.finish_reason,
            environment=episode.environment,
        )
        played = await episode.reward()
        judged: Score | Exception = Score(reward=0.0)
        if self.rewards:
            (judged,) = await self.judge(prompt, [answer])
        if isinstance(judged, Score):
            parts = {**judged.parts, TURNS: float(len(conversation.turns)), **episode.counts}
            if episode.environment is not None:
                whole = judged.reward + played
                parts |= {EXACT: float(whole >= self.arguments.reward_right), ENVIRONMENT: played}
            judged = Score(reward=judged.reward + played, parts=parts)
        return self.rollout(prompt, completion, judged)


class UserCodeFailed(Exception):
    """Code of the user's, or what it gave, led to `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Episode:
    """One sample's environment, its tools, and what it was worth so far."""

    def __init__(self, tools: Mapping[str, ToolFunction], make: Callable[[], Any] | None) -> None:
        """`make`: what makes the environment when the episode begins; None: there is none."""
        self.environment: Any = None
        self.tools = dict(tools)
        self.counts: dict[str, float] = {}
        self._make = make
        self._reward = 0.0

    async def begin(self, prompt: Prompt) -> Prompt:
        """The prompt with the first observation behind it. Raises UserCodeFailed."""
        if self._make is None:
            return prompt
        with _of_user():
            self.environment = self._make()
            self.tools |= methods_of(self.environment)
            row = _accepted(self.environment.reset, prompt.metadata)
            return _followed(prompt, await _called(self.environment.reset, **row))

    async def observe(self, text: str, *, chat: bool) -> Observation | None:
        """What the policy reads after a turn of this text; None: the episode is over. Raises UserCodeFailed."""
        if hasattr(self.environment, "step"):
            return await self._step(text, chat)
        calls = named_calls(text) if self.tools else []
        self.counts[CALLS] = self.counts.get(CALLS, 0.0) + len(calls)
        if not calls:
            return None
        with _of_user():
            answers = [await self._answer(call) for call in calls]
        if not chat:
            return "".join(f"\n<result>{answer}</result>\n" for answer in answers)
        return [Message(role="tool", content=answer) for answer in answers]

    async def reward(self) -> float:
        """The reward of all steps, and of `get_reward`. Raises UserCodeFailed."""
        if self.environment is None or not hasattr(self.environment, "get_reward"):
            return self._reward
        with _of_user():
            return self._reward + float(await _called(self.environment.get_reward) or 0.0)

    async def end(self) -> None:
        """Let go of the environment. What `close` raises is logged: it says nothing of the answer."""
        try:
            if hasattr(self.environment, "close"):
                await _called(self.environment.close)
        except Exception as error:  # the policy for foreign environments: log, go on
            log.warning("%s was not closed: %s", type(self.environment).__name__, describe(error))

    async def _step(self, text: str, chat: bool) -> Observation | None:
        with _of_user():
            observed, reward, over = _stepped(await _called(self.environment.step, text))
            self._reward += reward
            if over or observed is None:
                return None
            return [Message(role="user", content=str(observed))] if chat else str(observed)

    async def _answer(self, call: FunctionCall | ToolCall) -> str:
        if isinstance(call, ToolCall) and call.error is not None:
            return f"error: {call.error}"
        if call.name not in self.tools:
            return f"error: no tool {call.name!r}; there are {', '.join(self.tools)}"
        return await self.tools[call.name].call(call.argument if isinstance(call, ToolCall) else call.arguments)


def check_environment(make: Callable[[], Any] | None, tools: Mapping[str, ToolFunction]) -> None:
    """Make one. Raises ValueError for one in which nothing can be done."""
    if make is None:
        return
    name = getattr(make, "__name__", type(make).__name__)
    try:
        environment = make()
    except Exception as error:  # the user's code
        raise ValueError(
            f"environment: {name} cannot be made: {describe(error)}; allowed: a class without arguments"
        ) from error
    if not callable(getattr(environment, "reset", None)):
        raise ValueError(f"environment: {name} has no method reset; allowed: a class with reset and step")
    if not hasattr(environment, "step") and not methods_of(environment) and not tools:
        raise ValueError(
            f"environment: {name} has neither step nor public methods; allowed: a class with reset and step"
        )


def methods_of(environment: Any) -> dict[str, ToolFunction]:
    """The public methods of an environment without `step`: its tools. Raises ValueError as ToolFunction does."""
    if hasattr(environment, "step"):
        return {}
    methods = inspect.getmembers(environment, inspect.ismethod)
    return {name: ToolFunction(method) for name, method in methods if name[0] != "_" and name not in OWN_METHODS}


def _conversation(inference: Inference, prompt: Prompt, tools: Mapping[str, ToolFunction]) -> Conversation:
    """Told of its tools by the chat template where that can, and in words where not."""
    if not tools:
        return Conversation(inference, prompt)
    if prompt.messages is not None:
        try:
            return Conversation(inference, prompt, [tool.description for tool in tools.values()])
        except ValueError:  # a template without tools
            pass
    usage = "".join(f"- {tool.usage}\n" for tool in tools.values())
    form = '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>'
    words = f"Tools:\n{usage}To use one, write {form} and wait for its answer."
    if prompt.messages is None:
        return Conversation(inference, replace(prompt, text=f"{words}\n{prompt.text}"))
    first, *rest = prompt.messages
    if first["role"] != "system":
        return Conversation(inference, replace(prompt, messages=(Message(role="system", content=words), first, *rest)))
    told = Message(role="system", content=f"{first['content']}\n{words}")
    return Conversation(inference, replace(prompt, messages=(told, *rest)))


def _followed(prompt: Prompt, observed: Any) -> Prompt:
    """The prompt with what `reset` gave behind it: an observation, or (observation, info) as of Gymnasium."""
    if isinstance(observed, tuple):
        observed = observed[0]
    if observed is None:
        return prompt
    if prompt.messages is None:
        return replace(prompt, text=f"{prompt.text}{observed}")
    *before, last = prompt.messages
    return replace(prompt, messages=(*before, Message(role=last["role"], content=f"{last['content']}{observed}")))


def _stepped(said: Any) -> tuple[Any, float, bool]:
    """Observation, reward, and whether it is over: of three values, or of Gymnasium's five. Raises ValueError."""
    match said:
        case (observed, reward, over) | (observed, reward, over, dict()) if _is_flag(over):
            return observed, float(reward), bool(over)
        case (observed, reward, terminated, truncated, dict()) if _is_flag(terminated) and _is_flag(truncated):
            return observed, float(reward), bool(terminated or truncated)
    raise ValueError(f"step gave {str(said)[:80]!r}; allowed: (observation, reward, done), or Gymnasium's five values")


def _is_flag(value: Any) -> bool:
    """NumPy's own are no bool, nor int."""
    return isinstance(value, int | np.integer | np.bool_) and value in (0, 1)


def _accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function has arguments for."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(row)
    names = {each.name for each in parameters}
    return {name: value for name, value in row.items() if name in names}


async def _called(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What code of the user's gives, `async` or not. Raises whatever that raises."""
    said = function(*given, **named)
    return await said if inspect.isawaitable(said) else said


@contextlib.contextmanager
def _of_user(kind: type[Exception] = Exception) -> Iterator[None]:
    """Raises UserCodeFailed for errors of this kind: the sample is unscored, and no other is."""
    try:
        yield
    except kind as error:
        raise UserCodeFailed(error) from error

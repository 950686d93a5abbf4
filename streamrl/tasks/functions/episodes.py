"""The same rows, played over several turns: with typed functions as tools, or in an environment of the user's.

    prompt + reset(**row) ─▶ turn ─▶ step(text), or the answers to its tool calls ─▶ turn ─▶ ... ─▶ rewards

An environment is a class without arguments. It has `reset(**row)`, which may return a first observation, and either
`step(text)` as Gymnasium has it, or public methods, which are tools, and `get_reward()`, as TRL has them. Any of these
may be `async`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from streamrl.tasks.conversation import Conversation
from streamrl.tasks.environment import EXACT, Completion, Inference, Message, Prompt, Rollout, Score
from streamrl.tasks.functions.rewards import Answer
from streamrl.tasks.functions.task import FunctionArguments, FunctionTask
from streamrl.tasks.functions.tools import ToolFunction
from streamrl.tasks.tool_calls import FunctionCall, ToolCall, named_calls
from streamrl.tasks.turns import TURNS, Observation

# The reward part that the environment itself gave, and the one that counts calls of tools.
ENVIRONMENT, CALLS = "environment", "tool_calls"

# Methods of an environment that are no tools.
OWN_METHODS = frozenset({"reset", "step", "get_reward", "close"})


class Episodes(FunctionTask):
    """Reward: of the steps, of `get_reward`, and the weighted sum of what the reward functions say."""

    has_turns = True
    tools: ClassVar[Mapping[str, ToolFunction]] = {}
    environment: ClassVar[Any] = None  # what makes one, without arguments; None: there is none

    def __init__(self, arguments: FunctionArguments, seed: int, split: str) -> None:
        """Raises ValueError where an environment has neither `reset` nor something to be done in it."""
        super().__init__(arguments, seed, split)
        if self.environment is not None:
            check_environment(type(self).environment, self.tools)

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        return list(await asyncio.gather(*(self._play(inference, prompt) for _ in range(n))))

    async def _play(self, inference: Inference, prompt: Prompt) -> Rollout:
        """One sample. Errors of `inference` propagate, those of the user's code cost the reward."""
        make = type(self).environment
        episode = Episode(self.tools, None if make is None else make())
        conversation: Conversation | None = None
        try:
            prompt = await episode.begin(prompt)
            conversation = _conversation(inference, prompt, episode.tools)
            while True:
                turn = await conversation.generate()
                if conversation.ended:
                    return Rollout(completion=conversation.completion, reward=0.0)
                said = await episode.observe(turn.text, chat=prompt.messages is not None)
                if said is None or len(conversation.turns) == self.arguments.max_turns:
                    break
                conversation.add(said)
            return await self._judge_episode(prompt, conversation, episode)
        except UserCodeFailed as failed:
            nothing = Completion.failed(inference.prompt_ids(prompt.content))
            done = conversation.completion if conversation is not None and conversation.turns else nothing
            return self.unscored(prompt, done, failed.error)
        finally:
            await episode.end()

    async def _judge_episode(self, prompt: Prompt, conversation: Conversation, episode: Episode) -> Rollout:
        completion, last = conversation.completion, conversation.turns[-1]
        followed = list(conversation.messages[len(prompt.messages or ()) :])
        answer = Answer(
            text=last.text,
            completion=completion.text if prompt.messages is None else followed,
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
    """An environment of the user's raised `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Episode:
    """One sample's environment, its tools, and what it was worth so far."""

    def __init__(self, tools: Mapping[str, ToolFunction], environment: Any) -> None:
        self.environment = environment
        self.tools = {**tools, **(methods_of(environment) if environment is not None else {})}
        self.counts: dict[str, float] = {}
        self._reward = 0.0
        self._steps = environment is not None and hasattr(environment, "step")

    async def begin(self, prompt: Prompt) -> Prompt:
        """The prompt with the first observation behind it. Raises UserCodeFailed."""
        if self.environment is None:
            return prompt
        observed = await _of_user(self.environment.reset, **_accepted(self.environment.reset, prompt.metadata))
        if isinstance(observed, tuple):  # as Gymnasium: (observation, info)
            observed = observed[0]
        if observed is None:
            return prompt
        if prompt.messages is None:
            return replace(prompt, text=f"{prompt.text}{observed}")
        *before, last = prompt.messages
        return replace(prompt, messages=(*before, Message(role=last["role"], content=f"{last['content']}{observed}")))

    async def observe(self, text: str, *, chat: bool) -> Observation | None:
        """What the policy reads after a turn of this text; None: the episode is over. Raises UserCodeFailed."""
        if self._steps:
            said = await _of_user(self.environment.step, text)
            observed, reward, over = _stepped(said)
            self._reward += reward
            if over or observed is None:
                return None
            return [Message(role="user", content=str(observed))] if chat else str(observed)
        calls = named_calls(text) if self.tools else []
        self.counts[CALLS] = self.counts.get(CALLS, 0.0) + len(calls)
        if not calls:
            return None
        answers = [await self._answer(call) for call in calls]
        if not chat:
            return "".join(f"\n<result>{answer}</result>\n" for answer in answers)
        return [Message(role="tool", content=answer) for answer in answers]

    async def reward(self) -> float:
        """Of the steps, and of `get_reward`. Raises UserCodeFailed."""
        if self.environment is None or not hasattr(self.environment, "get_reward"):
            return self._reward
        return self._reward + float(await _of_user(self.environment.get_reward) or 0.0)

    async def end(self) -> None:
        """Let go of the environment. Raises UserCodeFailed."""
        if hasattr(self.environment, "close"):
            await _of_user(self.environment.close)

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
    environment = make()
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


def _stepped(said: Any) -> tuple[Any, float, bool]:
    """Observation, reward, and whether it is over: of three values, or of Gymnasium's five. Raises UserCodeFailed."""
    match said:
        case (observed, reward, bool(over)) | (observed, reward, bool(over), dict()):
            return observed, float(reward), over
        case (observed, reward, bool(terminated), bool(truncated), dict()):
            return observed, float(reward), terminated or truncated
    error = ValueError(
        f"step gave {str(said)[:80]!r}; allowed: (observation, reward, done), or Gymnasium's five values"
    )
    raise UserCodeFailed(error)


def _accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a function has arguments for."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return dict(row)
    names = {each.name for each in parameters}
    return {name: value for name, value in row.items() if name in names}


async def _of_user(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call code of the user's, `async` or not. Raises UserCodeFailed."""
    try:
        said = function(*given, **named)
        return await said if inspect.isawaitable(said) else said
    except Exception as error:  # the policy for foreign environments: the sample is unscored
        raise UserCodeFailed(error) from error

"""What a task is: prompts by index, and groups of scored rollouts through an inference handle.

    Prompt ──▶ Inference.generate ──▶ n Completions ──▶ score ──▶ n Rollouts

An environment knows nothing of tickets, versions or the learner. A task of one turn gives `prompt` and `score`. Of
several turns or with tools: `tasks/turns.py`, judged as a group: `tasks/grouped.py`. Each overrides what it needs.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NotRequired, Protocol, TypedDict

import numpy as np

from streamrl.tasks.arguments import ARGUMENTS, TaskArguments
from streamrl.tasks.failures import INFRASTRUCTURE, describe, is_masked
from streamrl.tasks.starter import Starter
from streamrl.types import PolicyVersion, VersionSpan

if TYPE_CHECKING:
    from streamrl.tasks.cut import Cut
    from streamrl.tasks.left_out import Fitting
    from streamrl.tasks.parsing import Parsers

log = logging.getLogger(__name__)

# The reward part that every task gives: 1.0 for a wholly right answer, else 0.0. The pass rate is its mean.
EXACT = "exact"

# The reward part that is 1.0 for a rollout on which the scorer raised; absent from all others.
FAILED = "failed"


class Message(TypedDict):
    """One turn of a conversation, in the form that chat templates take."""

    role: str  # system | user | assistant | tool
    content: str | list[dict[str, Any]]  # text, or the parts of a text with images, as the chat template takes them
    tool_calls: NotRequired[list[dict[str, Any]]]  # an assistant's, in OpenAI's form with arguments as a mapping
    tool_call_id: NotRequired[str]  # of the call that a tool's message answers
    reasoning_content: NotRequired[str]  # of an answer to an agent: its reasoning, where the run parses that


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One question: either plain text or messages for the model's chat template.

    Example: `Prompt(index=7, text="caf=", answer="caf")`.
    """

    index: int  # what the task was asked for, and knows the prompt by; counts up through the epochs of its prompts
    text: str | None = None  # tokenised as it is
    messages: tuple[Message, ...] | None = None  # rendered by the chat template, with a generation prompt
    images: tuple[str, ...] = ()  # paths, URLs or data URLs, on the worker's machine; the text has a place for each
    tools: tuple[dict[str, Any], ...] = ()  # of several turns: functions that the chat template tells the policy of
    answer: str | None = None  # the right answer, where the task has one
    metadata: dict[str, Any] = field(default_factory=dict)  # whatever the task's own scorer needs

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"prompt {self.index} needs either text or messages, not both or neither")

    @property
    def content(self) -> str | list[Message]:
        """What `Inference.generate` takes."""
        return self.text if self.text is not None else list(self.messages or ())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """One answer of the policy, token by token."""

    text: str  # decoded output, without special tokens
    prompt_ids: np.ndarray  # int32 [P]
    output_ids: np.ndarray  # int32 [T], with the end token where there is one
    logprobs: np.ndarray  # float32 [T], behaviour log-probs, as sampled
    spans: tuple[VersionSpan, ...]  # cover 0..T
    finish_reason: str  # stop | length | abort
    extras: dict[str, np.ndarray] = field(default_factory=dict)  # further numbers of each output token, [T, ...]
    loss_mask: np.ndarray | None = None  # bool [T], False where the policy did not write the token; None: it wrote all
    failure: str = ""  # of an aborted one: why (`types.FAILURES`)
    marked: str | None = None  # the text with special tokens, but for the end, where a parser of the run needs them

    @classmethod
    def failed(cls, prompt_ids: np.ndarray, failure: str = "server") -> Completion:
        """An answer that was not given: no tokens, finish reason `abort`."""
        return cls(
            text="",
            prompt_ids=prompt_ids,
            output_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            spans=(),
            finish_reason="abort",
            failure=failure,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """What one answer is worth."""

    reward: float  # finite
    parts: dict[str, float] = field(default_factory=dict)  # named contributions and measures, for the metrics


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """A further token sequence of a rollout: what the policy wrote in another context on the way to its answer."""

    completion: Completion
    reward: float | None = None  # its own, finite; None: the rollout's


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rollout:
    """A completion with its reward."""

    completion: Completion  # what is judged; where there are branches, the last token sequence
    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None  # why the scorer did not judge it: the exception, and its place in the user's code
    masked: bool = False  # the failure says nothing of the answer, which is not trained; else it has the lowest reward
    branches: tuple[Branch, ...] = ()  # the token sequences before the last one, which are trained with it

    @property
    def completions(self) -> tuple[Completion, ...]:
        """All of its token sequences; the one that is judged is the last."""
        return (*(branch.completion for branch in self.branches), self.completion)

    @property
    def is_answered(self) -> bool:
        """Was every answer given to its end?"""
        return all(completion.finish_reason != "abort" for completion in self.completions)


class Inference(Protocol):
    """The handle to the policy that an environment is given."""

    async def generate(
        self,
        prompt: str | list[Message] | np.ndarray,
        n: int,
        *,
        images: Sequence[str] = (),
        at_least: PolicyVersion | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """`n` answers to one prompt: text, messages, or token ids int32 [P].

        images: paths, URLs or data URLs, the same ones in all requests of a group. at_least: the oldest version that
        may answer. `sampling` overrides the configured sampling: `temperature`, `top_p`, `top_k`, `min_p`, `seed`,
        `stop`, `stop_token_ids`, `max_new_tokens`; `most_new_tokens` only lowers its number of tokens. Raises
        ValueError for what is not possible, such as temperature 0 in training.
        """
        ...

    def prompt_ids(self, prompt: str | Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        """int32 [P]: what `generate` makes of text or of messages. Raises ValueError where it cannot.

        tools: descriptions of functions, in OpenAI's form, of which the chat template tells the policy.
        """
        ...

    def added_ids(
        self,
        history: Sequence[Message],
        added: str | Sequence[Message],
        last: int | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> np.ndarray:
        """int32 [A]: what comes between an answer and the next one, tokenised on its own.

        Messages: what the chat template writes behind an answer to `history`, up to where the next answer begins,
        without the end token where the answer's `last` token is that. Text: as it is.
        """
        ...


class Environment(ABC):
    """A source of prompts and the judge of their answers.

    Usage:
        environment = build_task(config.task, seed=1, split="train")
        rollouts = await environment.rollout_group(inference, environment.prompt(0), n=8)

    One that a configuration names by its path, `task.name=package.module:Class`, is built as `Class(arguments, seed,
    split)`: the checked `task.args`, `run.seed`, and "train" or "probe".
    """

    Arguments: ClassVar[type[TaskArguments]] = TaskArguments
    """What the `task.args` of such a class are checked against."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Arguments that a configuration does not have to give, where they differ from those of `Arguments`."""

    starter: ClassVar[Starter] = Starter()
    """What `streamrl init` writes for it."""

    has_turns: bool = False
    """Does it generate several answers one after another for one sample? Then no other task can answer between them."""

    asks_itself: bool = False
    """Are its prompts known only where it asks the policy itself? Then no other task can ask them."""

    size: int | None = None
    """Prompts of one epoch; None: no prompt comes back."""

    fitting: Fitting | None = None
    """The prompts that are asked where some are too long, which the run knows and not the task; None: all."""

    cut: Cut | None = None
    """How the prompts are cut that are too long; None: they are not."""

    parsers: Parsers | None = None
    """What reads the calls and the reasoning of answers, which the run knows and not the task; None: its defaults."""

    max_branches: int = 1
    """Token sequences of one rollout at most, `task.max_branches`, which the run knows and not the task."""

    runs_inline: ClassVar[bool] = False
    """Said by a class of itself: no method of it computes, or waits without `await`, for more than milliseconds. Then
    it runs in the worker's event loop; any other class of the user's runs in processes of its own."""

    lowest_reward: float = 0.0
    """Reward of an answer on which the scorer raises: nothing that an answer can do may be worth less."""

    infrastructure: tuple[type[Exception], ...] = INFRASTRUCTURE
    """Exceptions of the scorer that say nothing of the answer: its sample is masked. All others are the answer's."""

    def __init__(self, *given: Any) -> None:  # noqa: B027 (most classes have their own)
        """Built with what a configuration says, of which this needs nothing."""

    @property
    def judges_groups(self) -> bool:
        """Does it judge the answers of a group together? Then one answer alone has no score that means anything.

        True for a class with a `score_all` of its own. One that has it for speed alone, and gives each answer what
        `score` gives it, says `judges_groups = False`.
        """
        return type(self).score_all is not Environment.score_all

    @abstractmethod
    def prompt(self, index: int) -> Prompt:
        """The prompt of `index` >= 0: the same one for the same task, seed and split, on any machine."""

    async def fetch(self, index: int) -> Prompt:
        """The prompt of `index`, wherever the task runs: what all who run tasks call."""
        return self.prompt(index)

    @abstractmethod
    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Judge one answer. May raise: the sample then gets the lowest reward, or is masked, and is counted."""

    async def rollout_group(self, inference: Inference, prompt: Prompt, n: int) -> list[Rollout]:
        """One turn: `n` answers, each scored on its own. Errors of `inference` propagate, those of a scorer do not."""
        completions = await inference.generate(prompt.content, n, images=prompt.images)
        return await self.score_all(prompt, completions)

    async def score_all(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Rollout]:
        """Score each completion; a scorer that raises costs its sample the reward, never the run."""
        return list(await asyncio.gather(*(self._rollout(prompt, completion) for completion in completions)))

    async def _rollout(self, prompt: Prompt, completion: Completion) -> Rollout:
        try:
            score = await self.score(prompt, completion)
            check_reward(score)
        except Exception as error:  # the policy for foreign scorers: count, log, go on
            return self.unscored(prompt, completion, error)
        return Rollout(completion=completion, reward=score.reward, parts=score.parts)

    def unscored(
        self, prompt: Prompt, completion: Completion, error: Exception, branches: tuple[Branch, ...] = ()
    ) -> Rollout:
        """The rollout of an answer whose scorer raised `error`: the lowest reward and the part FAILED, or masked.

        `branches`: as `Rollout` has them; they, too, have the lowest reward.
        """
        failure, masked = describe(error), is_masked(error, self.infrastructure)
        log.warning("prompt %d: scoring %.80r failed: %s", prompt.index, completion.text, failure)
        if masked:
            return Rollout(completion=completion, reward=0.0, failure=failure, masked=True)
        reward, parts = self.lowest_reward, {FAILED: 1.0}
        others = tuple(replace(branch, reward=None) for branch in branches)
        return Rollout(completion=completion, reward=reward, parts=parts, failure=failure, branches=others)

    async def close(self) -> None:  # noqa: B027 (most tasks hold nothing)
        """Let go of what the environment holds (processes, files). May be called twice."""


class Around(Environment):
    """A task that has its prompts, or its scorer, from another one: `task.args.task`, which `Arguments` has as `task`.

    Built as `Class(arguments, task, seed, split)`, with the environment of the other one; None where none is given.
    """

    _task: Environment

    def _follow(self, task: Environment) -> None:
        """Ask the prompts of the other one; an answer on which its scorer raises counts as it does there."""
        self._task = task
        self.size, self.lowest_reward, self.infrastructure = task.size, task.lowest_reward, task.infrastructure

    def _judge_by(self, task: Environment, name: str) -> None:
        """Follow the other one, called `name`, and judge each answer as it does.

        Raises ValueError for one that judges the answers of a group together.
        """
        if task.judges_groups:
            raise ValueError(
                f"{ARGUMENTS}.task.name: {name} judges the answers of a group together; allowed: a task that judges "
                "each answer alone (a class whose score_all does says judges_groups = False)"
            )
        self._follow(task)

    def prompt(self, index: int) -> Prompt:
        return self._task.prompt(index)

    async def fetch(self, index: int) -> Prompt:
        return await self._task.fetch(index)


def message_text(message: Message) -> str:
    """The text of a message, without what is no text."""
    content = message.get("content") or ""  # a message of calls may have none
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def check_reward(score: Score) -> None:
    """Raise TypeError or ValueError unless the reward and its parts are finite numbers."""
    if not isinstance(score, Score):
        raise TypeError(f"the scorer gave a value of type {type(score).__name__}, a Score is needed")
    for name, number in (("reward", score.reward), *((f"part {name!r}", part) for name, part in score.parts.items())):
        if not math.isfinite(number):
            raise ValueError(f"{name} is {number}, a finite number is needed")

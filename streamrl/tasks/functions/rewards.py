"""Reward functions of the user's, with the arguments that TRL gives them, or of one answer.

    def reward(completions, answer, **columns) -> list[float | None]        a batch: all answers of a group
    def reward(completion, answer) -> float | dict[str, float] | None       one answer; a mapping has "reward" and parts

A function is of a batch where it names something that only a batch has, or takes everything and names nothing that only
one answer has.
Arguments are given by their names: those of `BATCH` or `SINGLE`, and any column of the data set. Either form may be
`async`. None: the function has no say on that answer.
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.tasks.environment import EXACT, Message, Score

# What a function of a batch may ask for. All lists, one entry an answer.
BATCH = ("prompts", "completions", "completion_ids", "finish_reasons", "environments")

# What a function of one answer may ask for. `text` is of the policy's last turn; `completion` is, as in TRL, a list of
# messages where the prompt is one.
SINGLE = ("prompt", "completion", "text", "completion_ids", "finish_reason", "row", "environment")


class NoReward(ValueError):
    """No function had a say on an answer: it is not trained."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer as reward functions see it."""

    text: str  # of the policy's last turn
    completion: str | list[Message]  # of all turns: messages where the prompt is a list of them
    completion_ids: Sequence[int]
    finish_reason: str  # stop | length
    environment: Any = None  # the instance that it was played in


class RewardFunction:
    """A function, and which arguments it is given.

    >>> reward = RewardFunction(lambda completions, answer: [float(a in c) for c, a in zip(completions, answer)])
    >>> answers = [Answer("4", "4", (9,), "stop"), Answer("5", "5", (8,), "stop")]
    >>> asyncio.run(reward("2+2=", answers, {"answer": "4"}))
    [{'reward': 1.0}, {'reward': 0.0}]
    """

    def __init__(self, function: Callable[..., Any], weight: float = 1.0) -> None:
        """Raises ValueError for a weight that is no number, and a function without a name for any argument."""
        if not math.isfinite(weight):
            raise ValueError(f"reward_weights: {weight} of {name_of(function)} is not allowed; allowed: finite numbers")
        self.name = name_of(function)
        self.weight = weight
        self.function = function
        parameters = inspect.signature(function).parameters.values()
        self._named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        self._required = {each.name for each in parameters if each.name in self._named and each.default is each.empty}
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self.of_batch = not self._named.isdisjoint({*BATCH} - {*SINGLE}) or (
            self._takes_all and self._named.isdisjoint({*SINGLE} - {*BATCH})
        )
        if unnamed := [each.name for each in parameters if each.kind is each.POSITIONAL_ONLY]:
            raise ValueError(f"reward: {self.name} has the argument {unnamed[0]!r} without a name; allowed: named ones")

    def check(self, columns: Collection[str]) -> None:
        """Raise ValueError for an argument that is neither offered nor a column: one line with what is allowed."""
        offered = BATCH if self.of_batch else SINGLE
        known = [*offered, *(column for column in columns if column not in offered)]
        for name in sorted(self._required.difference(known)):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; nearest known argument: {near[0]}" if near else ""
            raise ValueError(
                f"reward: {self.name} asks for {name!r}, which is no column; allowed: {', '.join(known)}{hint}"
            )

    async def __call__(
        self, prompt: str | Sequence[Message], answers: Sequence[Answer], row: Mapping[str, Any]
    ) -> list[dict[str, float] | Exception | None]:
        """What it says of each answer: "reward" and parts, None, or what it raised.

        A function of a batch that raises has raised on every answer.
        """
        if self.of_batch:
            try:
                return list(await self._of_batch(prompt, answers, row))
            except Exception as error:  # the user's code: its answers are unscored
                return [error] * len(answers)
        return list(await asyncio.gather(*(self._of_one(prompt, answer, row) for answer in answers)))

    async def _of_batch(
        self, prompt: str | Sequence[Message], answers: Sequence[Answer], row: Mapping[str, Any]
    ) -> list[dict[str, float] | None]:
        given = {
            **{name: [value] * len(answers) for name, value in row.items() if name != "prompt"},
            "prompts": [prompt] * len(answers),
            "completions": [answer.completion for answer in answers],
            "completion_ids": [list(answer.completion_ids) for answer in answers],
            "finish_reasons": [answer.finish_reason for answer in answers],
            "environments": [answer.environment for answer in answers],
        }
        said = list(await self._call(given))
        if len(said) != len(answers):
            raise ValueError(f"{self.name} gave {len(said)} rewards for {len(answers)} answers")
        return [_read(each) for each in said]

    async def _of_one(
        self, prompt: str | Sequence[Message], answer: Answer, row: Mapping[str, Any]
    ) -> dict[str, float] | Exception | None:
        given = {
            **row,
            "prompt": prompt,
            "completion": answer.completion,
            "text": answer.text,
            "completion_ids": list(answer.completion_ids),
            "finish_reason": answer.finish_reason,
            "row": dict(row),
            "environment": answer.environment,
        }
        try:
            return _read(await self._call(given))
        except Exception as error:  # the user's code: this answer is unscored
            return error

    async def _call(self, given: Mapping[str, Any]) -> Any:
        said = self.function(**{name: value for name, value in given.items() if self._takes_all or name in self._named})
        return await said if inspect.isawaitable(said) else said


def name_of(function: Callable[..., Any]) -> str:
    """What the metrics call it."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def combined(functions: Sequence[RewardFunction], said: Sequence[dict[str, float] | None], right: float) -> Score:
    """The weighted sum of what the functions said of one answer; each is a part under its name.

    right: reward from which on the answer is wholly right, where no function gives the part `exact`.
    Raises NoReward where none of them said anything.
    """
    spoken = [(each, words) for each, words in zip(functions, said, strict=True) if words is not None]
    if not spoken:
        raise NoReward("every reward function gave None")
    reward = sum(each.weight * words["reward"] for each, words in spoken)
    parts = {EXACT: float(reward >= right)}
    for each, words in spoken:
        if len(functions) > 1:
            parts[each.name] = words["reward"]
        parts |= {name: value for name, value in words.items() if name != "reward"}
    return Score(reward=reward, parts=parts)


def _read(said: Any) -> dict[str, float] | None:
    """Raises ValueError for a mapping without a reward, TypeError for what is no number."""
    if said is None:
        return None
    words = dict(said) if isinstance(said, Mapping) else {"reward": said}
    if "reward" not in words:
        raise ValueError(f"the mapping has no 'reward', but {', '.join(map(repr, words)) or 'nothing'}")
    return {str(name): float(value) for name, value in words.items()}

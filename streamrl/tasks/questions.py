"""Questions of a data set: asked through the chat template or as text, judged by the answer that is found.

row ──▶ question, right answer                text ──▶ the answer in it ──▶ right, wrong or unreadable ──▶ reward
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from streamrl.tasks import answers, countdown
from streamrl.tasks.arguments import ARGUMENTS, OnDisk
from streamrl.tasks.environment import EXACT, Completion, Environment, Message, Prompt, Score, message_text
from streamrl.tasks.failures import ScorerUnready
from streamrl.tasks.images import image_references, marked_text, with_images
from streamrl.tasks.math_reward import MathReward
from streamrl.tasks.messages import asked_of
from streamrl.tasks.order import item_at
from streamrl.tasks.rows import Rows, RowsArguments, text_of, value_at
from streamrl.tasks.starter import Starter
from streamrl.tasks.user_reward import GIVEN, UserReward, check_target

# The reward part that is 1.0 where an answer was found and could be read, else 0.0.
PARSED = "parsed"

# The reward part that is 1.0 for a right answer with text behind it, or in a text that was cut; else 0.0.
PARTIAL = "partial"

# The instruction behind the questions of most data sets of mathematics.
BOXED = "\n\nReason step by step, and put the final answer within \\boxed{}."

_COLUMN = re.compile(r"\{(\w+(?:\.\w+)*)\}")


class QuestionsArguments(RowsArguments):
    """Arguments of every task that asks questions of a data set; most have other defaults."""

    prompt: str = Field("prompt", description="column of the questions: text, or a list of chat messages")
    template: str | None = Field(None, description="question with {column} in it, instead of a column of questions")
    suffix: str = Field("", description="text put behind every question")
    system: str | None = Field(None, description="system message of the chat; null: none")
    images: str | None = Field(None, description="column of the images: a path, a URL, bytes, or a list of them")
    chat: bool = Field(True, description="ask through the model's chat template; false: plain text")
    answer: str = Field("answer", description="column of the right answers")
    answer_after: str | None = Field(None, description="mark after which the right answer comes, such as '####'")
    answer_boxed: bool = Field(False, description="the right answer is what the column has in its last box")
    form: answers.Form = Field("whole", description="where the answer is in the model's text")
    judge: Literal["math", "text", "countdown"] = Field("math", description="how an answer is compared")
    numbers: str = Field("nums", description="column of the numbers of countdown")
    reward: Annotated[str | None, OnDisk("code")] = Field(
        None, description="function of yours that scores, instead of all of the above"
    )
    reward_right: float = Field(1.0, description="reward of a right answer")
    reward_partial: float = Field(1.0, description="reward of a right answer with text behind it, or in a cut text")
    reward_wrong: float = Field(0.0, description="reward of a wrong answer in the right form")
    reward_unparsed: float = Field(0.0, description="reward of a text without an answer that can be read")
    reward_failed: float | None = Field(
        None, description="reward of an answer on which the scorer raises; null: the lower one of the two before"
    )
    score_processes: int = Field(2, ge=1, description="processes that judge answers")
    score_timeout: float = Field(5.0, gt=0, description="seconds that judging one answer may take")
    score_memory: int = Field(4 << 30, ge=1 << 28, description="bytes of address space of a judging process")
    start_timeout: float = Field(60.0, gt=0, description="seconds that a judging process may take to be ready")

    @model_validator(mode="after")
    def _rewards_are_in_order(self) -> QuestionsArguments:
        if not self.reward_right >= self.reward_partial >= max(self.reward_wrong, self.reward_unparsed):
            raise ValueError(
                f"reward_partial: {self.reward_partial:g} is not allowed between reward_right={self.reward_right:g}, "
                f"reward_wrong={self.reward_wrong:g} and reward_unparsed={self.reward_unparsed:g}; "
                "allowed: right >= partial >= the other two"
            )
        return self

    @field_validator("template")
    @classmethod
    def _template_has_columns(cls, template: str | None) -> str | None:
        if template is not None and not _COLUMN.search(template):
            raise ValueError(
                f"template: {template!r} has no column, and every question would be the same; allowed: {{COLUMN}} in it"
            )
        return template

    @property
    def lowest_reward(self) -> float:
        """The reward of an answer on which the scorer raises."""
        return min(self.reward_wrong, self.reward_unparsed) if self.reward_failed is None else self.reward_failed

    @property
    def asked(self) -> dict[str, str]:
        """The columns of the question, by the arguments that name them."""
        images = {"images": self.images} if self.images else {}
        if self.template is None:
            return {"prompt": self.prompt, **images}
        return {f"template.{name}": name for name in _COLUMN.findall(self.template)} | images

    @property
    def columns(self) -> dict[str, str]:
        """All columns that a row must have, by the arguments that name them."""
        columns = self.asked | {"answer": self.answer}
        return columns | ({"numbers": self.numbers} if self.judge == "countdown" else {})


class Questions(Environment):
    """The rows of one split, each once an epoch, in an order that (seed, epoch) gives."""

    Arguments = QuestionsArguments
    starter = Starter(shown=("path", "prompt", "answer", "suffix", "form", "reward", "held_out"), max_new_tokens=1024)
    size: int  # prompts of an epoch

    def __init__(self, arguments: QuestionsArguments, seed: int, split: str) -> None:
        self._arguments = arguments
        self._seed = seed
        self.lowest_reward = arguments.lowest_reward
        if arguments.reward is None:
            self.infrastructure = (ScorerUnready,)  # where mathematics hangs or ends, it is the answer that did it
        if arguments.reward is not None:
            _check_reward(arguments.reward, arguments.start_timeout)
        asked = list(arguments.asked.values())
        needed = [column for key, column in arguments.asked.items() if key != "images"]
        needed += [arguments.answer] if arguments.reward is None else []  # a function may judge without one
        self._rows = Rows(arguments, arguments.columns, asked, held_out=split == "probe", needed=needed)
        self.size = len(self._rows)
        self.prompt(0)
        self._math: MathReward | None = None
        self._own: UserReward | None = None

    def prompt(self, index: int) -> Prompt:
        """Prompt `index`; one epoch has `size` of them."""
        place = item_at(index, self.size, self._seed)
        row = self._rows[place]
        question = self._question(row, index)
        values = {name: value for name, value in row.items() if name != self._arguments.images}
        metadata = {"row": self._rows.number(place), "values": values}
        answer, images = self._answer(row), self._images(row)
        if not self._arguments.chat:
            if not isinstance(question, str):
                raise ValueError(
                    f"{ARGUMENTS}.chat: false is not allowed where column {self._arguments.prompt!r} holds no plain "
                    f"text; allowed: true; nearest known key: {ARGUMENTS}.chat"
                )
            text = question + self._arguments.suffix
            return Prompt(index=index, text=text, images=images, answer=answer, metadata=metadata)
        messages = self._messages(question)
        messages = with_images(messages, len(images)) if self._arguments.images else messages
        return Prompt(index=index, messages=messages, images=images, answer=answer, metadata=metadata)

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        """The reward of the four cases, or what the user's function says."""
        arguments = self._arguments
        if arguments.reward is not None:
            return await self._own_score(prompt, completion)
        found = answers.find_answer(completion.text, arguments.form)
        right = None if found is None else await self._verdict(found.answer, prompt)
        if found is None or right is None:
            return Score(reward=arguments.reward_unparsed, parts={EXACT: 0.0, PARSED: 0.0, PARTIAL: 0.0})
        if not right:
            return Score(reward=arguments.reward_wrong, parts={EXACT: 0.0, PARSED: 1.0, PARTIAL: 0.0})
        partial = found.trailing or completion.finish_reason != "stop"
        reward = arguments.reward_partial if partial else arguments.reward_right
        return Score(reward=reward, parts={EXACT: 1.0, PARSED: 1.0, PARTIAL: float(partial)})

    async def close(self) -> None:
        for judges in (self._math, self._own):
            if judges is not None:
                await judges.close()

    async def _verdict(self, answer: str, prompt: Prompt) -> bool | None:
        """Whether an answer is right; None for one that cannot be read."""
        gold = prompt.answer or ""
        match self._arguments.judge:
            case "text":
                return " ".join(answer.split()) == " ".join(gold.split())
            case "countdown":
                numbers = value_at(prompt.metadata["values"], self._arguments.numbers)
                return countdown.verdict(answer, numbers, int(gold))
            case "math":
                self._math = self._math or MathReward(**self._limits)
                marked = answer if self._arguments.form == "whole" or "$" in answer else f"${answer}$"
                return await self._math.verdict(marked, gold)

    async def _own_score(self, prompt: Prompt, completion: Completion) -> Score:
        assert self._arguments.reward is not None
        self._own = self._own or UserReward(self._arguments.reward, **self._limits)
        row = prompt.metadata["values"]
        score = await self._own.score(completion.text, prompt.answer or "", row, completion.finish_reason)
        whole = float(score.reward >= self._arguments.reward_right)
        return Score(reward=score.reward, parts={EXACT: whole} | score.parts)

    @property
    def _limits(self) -> dict[str, Any]:
        arguments = self._arguments
        return {
            "processes": arguments.score_processes,
            "timeout": arguments.score_timeout,
            "start_timeout": arguments.start_timeout,
            "memory": arguments.score_memory,
        }

    def _question(self, row: dict[str, Any], index: int) -> str | tuple[Message, ...]:
        if self._arguments.template is None:
            return asked_of(value_at(row, self._arguments.prompt), index)
        return _COLUMN.sub(lambda match: text_of(value_at(row, match[1])), self._arguments.template)

    def _answer(self, row: dict[str, Any]) -> str:
        value = value_at(row, self._arguments.answer)
        answer = "" if value is None else text_of(value)
        if self._arguments.answer_after is not None:
            answer = answer.rpartition(self._arguments.answer_after)[2].strip()
        return (answers.boxed(answer) or "") if self._arguments.answer_boxed else answer

    def _images(self, row: dict[str, Any]) -> tuple[str, ...]:
        if self._arguments.images is None:
            return ()
        beside = Path(self._arguments.path).parent if self._arguments.is_file else Path()
        value = value_at(row, self._arguments.images)
        return image_references(value, beside=beside, folder=self._arguments.images_folder)

    def _messages(self, question: str | tuple[Message, ...]) -> tuple[Message, ...]:
        turns = [Message(role="user", content=question)] if isinstance(question, str) else list(question)
        text = (marked_text if self._arguments.images else message_text)(turns[-1])
        turns[-1] = {**turns[-1], "content": text + self._arguments.suffix}
        if self._arguments.system is not None:
            turns.insert(0, Message(role="system", content=self._arguments.system))
        return tuple(turns)


def _check_reward(target: str, timeout: float) -> None:
    try:
        check_target(target, timeout, GIVEN)
    except ValueError as error:
        raise ValueError(
            f"{ARGUMENTS}.reward: {target!r} cannot be loaded ({error}); allowed: package.module:function or "
            f"path/file.py:function; nearest known key: {ARGUMENTS}.reward"
        ) from None

"""A language model with frozen weights as the judge of answers: it is asked in words, and a pattern reads its verdict.

prompt, answer ─▶ question ─▶ engine ─▶ "... Verdict: 7" ─▶ pattern ─▶ 0.7
                                          └ no verdict, no engine: the answer is not judged
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from streamrl.choices import JUDGES
from streamrl.config import Config
from streamrl.config.words import checked
from streamrl.tasks.arguments import ARGUMENTS, TaskArguments
from streamrl.tasks.environment import Prompt, message_text
from streamrl.tasks.failures import ScorerUnready

QUESTION = """\
Judge the answer to a question.

Question:
{prompt}

Answer:
{answer}

How good is the answer, from 0 (wrong or useless) to 10 (right and complete)? Give your reasons briefly, then a last \
line of the form "Verdict: NUMBER"."""

# Seconds until a judge that could not be asked is tried again: each answer until then says why at once.
AGAIN = 10.0

_PLACES = re.compile(r"\{(prompt|answer|expected)\}")


class JudgeArguments(TaskArguments):
    """How a judge is asked and read."""

    engine: Annotated[str, JUDGES] = Field("openai", description="what answers the judge's questions")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="options of the engine")
    model: Path = Field(description="the judge's folder: tokenizer and chat template, and for transformers weights")
    question: str = Field(QUESTION, description="with the places {prompt}, {answer} and {expected} for their texts")
    verdict: str = Field(
        r"(?i)verdict\W*(\d+(?:\.\d+)?)", description="pattern with one group: its last match is the verdict"
    )
    scores: dict[str, float] | None = Field(
        None, description="score of each verdict, in lower case; null: a verdict is a number, from 0 to `best`"
    )
    best: float = Field(10.0, gt=0, description="the verdict that is worth 1")
    verdicts: int = Field(1, ge=1, description="verdicts on each answer, whose mean is its score; several are sampled")
    max_new_tokens: int = Field(512, ge=1, description="tokens of the judge's answer")
    timeout: float = Field(120.0, gt=0, description="seconds that a question may take")
    questions_at_once: int = Field(64, ge=1, description="questions in flight of each worker")

    @model_validator(mode="after")
    def _can_be_asked_and_read(self) -> JudgeArguments:
        if "{answer}" not in self.question:
            raise ValueError(f"question: {self.question!r:.60} has no place for the answer; allowed: with {{answer}}")
        try:
            groups = re.compile(self.verdict).groups
        except re.error as error:
            raise ValueError(
                f"verdict: {self.verdict!r} is no pattern ({error}); allowed: one of Python's re"
            ) from None
        if groups != 1:
            raise ValueError(f"verdict: {self.verdict!r} has {groups} groups; allowed: one")
        for verdict in self.scores or ():
            if verdict != verdict.lower():
                raise ValueError(
                    f"scores: {verdict!r} is compared in lower case and never found; allowed: {verdict.lower()!r}"
                )
        return self


class ModelJudge:
    """The judge of a task, opened with the first question; `close` it.

    Usage:
        judge = ModelJudge(arguments)
        await judge.score(prompt, "42")  # 0.7
    """

    def __init__(self, arguments: JudgeArguments) -> None:
        """Raises ValueError, with a line that begins with the key, for an engine that cannot judge."""
        declaration = JUDGES.load(arguments.engine)
        if declaration.trains:
            able = [name for name in JUDGES.names if not JUDGES.load(name).trains]
            raise ValueError(
                f"{ARGUMENTS}.engine: {arguments.engine} is what a run trains with; allowed: {', '.join(able)}, or one "
                "of your own"
            )
        if not (arguments.model / "tokenizer.json").exists():
            raise ValueError(f"{ARGUMENTS}.model: {arguments.model} has no tokenizer.json; allowed: the judge's folder")
        options = checked(declaration.Options, arguments.engine_options, f"{ARGUMENTS}.engine_options")
        self._engine = declaration(options)
        self._arguments = arguments
        self._config = Config.model_validate(
            {
                "model": {"path": arguments.model},
                "generate": {
                    "request_timeout": arguments.timeout,
                    "sampling": {"max_new_tokens": arguments.max_new_tokens},
                },
            }
        )
        self._places = asyncio.Semaphore(arguments.questions_at_once)
        self._opening = asyncio.Lock()
        self._opened = AsyncExitStack()
        self._ask: Any = None  # Ask of generate/judging.py
        self._failed: tuple[float, ScorerUnready] | None = None  # when it could not be opened, and why

    async def score(self, prompt: Prompt, answer: str) -> float:
        """The mean of the verdicts that can be read. Raises ScorerUnready where there is none."""
        async with self._places:
            texts = await (await self._open())(self.question(prompt, answer), self._arguments.verdicts)
        found = [score for text in texts if (score := self.read(text)) is not None]
        if not found:
            raise ScorerUnready(f"judge: no verdict in {texts[0][-200:]!r}")
        return sum(found) / len(found)

    def question(self, prompt: Prompt, answer: str) -> str:
        """What the judge is asked. A place inside the policy's own text is no place."""
        texts = {"prompt": _text(prompt), "answer": answer, "expected": prompt.answer or ""}
        return _PLACES.sub(lambda place: texts[place[1]], self._arguments.question)

    def read(self, text: str) -> float | None:
        """The score of a judge's answer; None where it says none."""
        matches = list(re.finditer(self._arguments.verdict, text))
        if not matches or matches[-1][1] is None:
            return None
        verdict = matches[-1][1]
        if self._arguments.scores is not None:
            return self._arguments.scores.get(verdict.lower())
        try:
            share = float(verdict) / self._arguments.best
        except ValueError:
            return None
        return share if 0.0 <= share <= 1.0 else None

    async def close(self) -> None:
        await self._opened.aclose()
        self._ask = None

    async def _open(self) -> Any:
        async with self._opening:
            if self._ask is not None:
                return self._ask
            if self._failed is not None and time.monotonic() < self._failed[0] + AGAIN:
                raise ScorerUnready(str(self._failed[1]))
            async with AsyncExitStack() as stack:
                scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="streamrl-judge-")))
                judge = self._engine.judge(self._config, scratch, greedy=self._arguments.verdicts == 1)
                try:
                    self._ask = await stack.enter_async_context(judge)
                except ScorerUnready as error:
                    self._failed = time.monotonic(), error
                    raise
                self._opened = stack.pop_all()
            return self._ask


def _text(prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in prompt.messages or ())

"""What an evaluation found: every answer with its judgement, and the figures of each task. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from streamrl.evaluate.estimate import Mean, mean, pass_at_k
from streamrl.tasks.environment import Message

GREEDY, REWARD, LENGTH = "greedy", "reward", "length"  # names of figures, beside pass@K


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """One answer and what it is worth."""

    text: str
    passed: bool
    reward: float
    parts: dict[str, float]
    tokens: int  # that the policy wrote
    finish_reason: str  # stop | length


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with its answers: a line of TASK.jsonl."""

    index: int
    prompt: str | list[Message]
    expected: str | None = None
    images: tuple[str, ...] = ()
    greedy: Judged | None = None
    answers: tuple[Judged, ...] = ()
    missing: int = 0  # answers that were asked for and did not come, the greedy one included
    reasons: tuple[str, ...] = ()  # why, each once

    @property
    def right(self) -> int:
        """How many of the sampled answers passed."""
        return sum(answer.passed for answer in self.answers)

    @property
    def asked(self) -> int:
        """Answers that were asked for, the greedy one included."""
        return len(self.answers) + (self.greedy is not None) + self.missing


class TaskFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one task. A prompt counts in pass@K where it has K answers at least."""

    prompts: int
    answers: int
    unanswered: float  # share of the answers that were asked for
    figures: dict[str, Mean]  # pass@K, greedy, reward, length
    reasons: tuple[str, ...] = ()  # why answers are missing: the first few


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """A whole evaluation: summary.json, with the questions in files of their own."""

    label: str  # the version, or the name of a model folder
    step: int | None  # learner steps in the weights, where they are a run's
    started: float  # seconds since the epoch
    seconds: float
    samples: int
    temperature: float
    max_new_tokens: int
    complete: bool  # every prompt was asked before the deadline
    tasks: dict[str, TaskFigures]

    def metrics(self) -> dict[str, float]:
        """As a run's metrics have them: eval/TASK/pass@1, ..., eval/step, eval/seconds."""
        found = {} if self.step is None else {"eval/step": float(self.step)}
        found["eval/seconds"] = self.seconds
        for task, each in self.tasks.items():
            found |= {f"eval/{task}/{name}": figure.value for name, figure in each.figures.items()}
            found[f"eval/{task}/unanswered"] = each.unanswered
        return found


def figures(questions: Sequence[Question], ks: Sequence[int], unasked: int = 0, each: int = 0) -> TaskFigures:
    """The figures of one task from its questions; `unasked` prompts had no time, with `each` so many answers."""
    missing = sum(question.missing for question in questions) + unasked * each
    asked = sum(question.asked for question in questions) + unasked * each
    reasons = dict.fromkeys(reason for question in questions for reason in question.reasons)
    if unasked:
        reasons = {f"{unasked} prompts were not asked within evaluate.timeout": None, **reasons}
    return TaskFigures(
        prompts=len(questions),
        answers=asked - missing,
        unanswered=missing / asked if asked else 0.0,
        figures={name: found for name, values in _values(questions, ks) if (found := mean(values)) is not None},
        reasons=tuple(reasons)[:3],
    )


def _values(questions: Sequence[Question], ks: Sequence[int]) -> Iterator[tuple[str, list[float]]]:
    """Name by name, one value for each prompt that has one."""
    answered = [question for question in questions if question.answers]
    for k in ks:
        enough = (question for question in answered if len(question.answers) >= k)
        yield f"pass@{k}", [pass_at_k(len(each.answers), each.right, k) for each in enough]
    yield GREEDY, [float(question.greedy.passed) for question in questions if question.greedy is not None]
    yield REWARD, [_average([answer.reward for answer in question.answers]) for question in answered]
    yield LENGTH, [_average([answer.tokens for answer in question.answers]) for question in answered]


def _average(values: Sequence[float]) -> float:
    return sum(values) / len(values)

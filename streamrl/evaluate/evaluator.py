"""The walk over the held-out prompts: each is asked, answered by one version of the policy, and judged.

    prompts, task by task in turn ──▶ in_flight of them at once ──▶ n answers and a greedy one ──▶ Question

It knows no server: the caller gives it an inference handle. An answer that fails, that comes after the deadline,
that nobody could judge, or that holds a token of another version is left out and counted; only a server that cannot be
reached ends the walk.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from streamrl.config import Config
from streamrl.config.evaluate import SCORING_TIME, EvaluateConfig
from streamrl.engine.client import EngineError
from streamrl.evaluate.results import Evaluation, Judged, Question, figures
from streamrl.observe.bars import Report, silent
from streamrl.tasks.asking import Handle, find_prompt, roll_out
from streamrl.tasks.environment import EXACT, Completion, Environment, Prompt, Rollout
from streamrl.tasks.episodes import together
from streamrl.tasks.failures import describe
from streamrl.tasks.hosted import check_tasks, host_tasks
from streamrl.tasks.left_out import fitting_size
from streamrl.tasks.scoring import judgements
from streamrl.types import PolicyVersion

log = logging.getLogger(__name__)

# Seed of the order in which held-out prompts are asked: every run, whatever its own seed, is asked the same ones.
ORDER = 0


class TellingHandle(Handle, Protocol):
    """An inference handle that says what went wrong."""

    failures: list[str]


class Handles(Protocol):
    """Gives a new handle to the policy that is evaluated, for one prompt."""

    def __call__(self, *, greedy: bool, deadline: float) -> TellingHandle:
        """`deadline`: seconds, on the event loop's clock."""
        ...


async def host_evaluated(config: Config) -> dict[str, Environment]:
    """The held-out split of every task that `evaluate` names, by label. Close them (`hosted.close_tasks`).

    Raises ValueError with one line for arguments that do not fit, and ScorerUnready.
    """
    return await host_tasks(config.evaluate.shares(config.task), ORDER, "probe", config.task)


def check_evaluated(config: Config) -> None:
    """Load every task that `evaluate` names once. Raises ValueError with one line for arguments that do not fit."""
    check_tasks(config.evaluate.shares(config.task), ORDER, "probe", config.task)


class Walk:
    """One evaluation of one version.

    Usage:
        walk = Walk(config.evaluate, tasks, {"copy": 64}, handles, version)
        await walk.run()
        walk.questions["copy"][0].right  # 3
    """

    def __init__(
        self,
        settings: EvaluateConfig,
        tasks: Mapping[str, Environment],
        counts: Mapping[str, int],
        handles: Handles,
        version: PolicyVersion,
        *,
        report: Report = silent,
    ) -> None:
        """`counts`: prompts of each task. `version` that every token must be of. `report`: prompts done, of all."""
        self.questions: dict[str, list[Question]] = {name: [] for name in tasks}
        self.complete = False  # every prompt was asked before the deadline
        self._settings = settings
        self._tasks = tasks
        self._counts = counts
        self._handles = handles
        self._version = version
        self._report = report
        self._deadline = 0.0

    async def run(self) -> None:
        """Until every prompt is judged, or `evaluate.timeout` is over. Raises EngineError for an unreachable server."""
        now = asyncio.get_running_loop().time
        self._deadline = now() + self._settings.timeout
        places = _in_turn(self._counts)
        try:
            async with asyncio.TaskGroup() as together:
                for _ in range(self._settings.in_flight):
                    together.create_task(self._ask_from(places))
        except ExceptionGroup as raised:
            raise raised.exceptions[0] from raised
        self.complete = next(places, None) is None
        for questions in self.questions.values():
            questions.sort(key=lambda question: question.index)

    async def _ask_from(self, places: Iterator[tuple[str, int]]) -> None:
        """Take prompt after prompt from what all share, as long as there is time."""
        now = asyncio.get_running_loop().time
        while now() < self._deadline and (place := next(places, None)) is not None:
            name, index = place
            self.questions[name].append(await self._ask(self._tasks[name], index))
            self._report(sum(map(len, self.questions.values())), sum(self._counts.values()))

    async def _ask(self, task: Environment, index: int) -> Question:
        """One prompt: n answers and, where it is asked for, a greedy one."""
        wanted = [(False, self._settings.samples)] + [(True, 1)] * self._settings.greedy
        try:
            async with asyncio.timeout_at(self._deadline + SCORING_TIME):
                prompt = await find_prompt(task, self._handles(greedy=True, deadline=self._deadline), index)
        except Exception as error:  # the policy for foreign tasks: the prompt is left out, not the evaluation
            reason = f"the prompt was not made: {describe(error)}"
            log.warning("prompt %d was not evaluated: %s", index, reason)
            return Question(index=index, prompt="", missing=sum(n for _, n in wanted), reasons=(reason,))
        found = await together(self._rollouts(task, index, prompt, greedy, n) for greedy, n in wanted)
        # A scorer that failed on every answer, if on one alone, says nothing of the policy.
        broken = None not in judgements([rollout for rollouts, _ in found for rollout in rollouts])
        judged = [self._counted(rollouts, broken, reasons) for rollouts, reasons in found]
        sampled, greedy = judged[0], judged[1] if len(judged) > 1 else []
        return Question(
            index=index,
            prompt=prompt.content,
            expected=prompt.answer,
            images=tuple(prompt.images),
            greedy=greedy[0] if greedy else None,
            answers=tuple(sampled),
            missing=sum(n for _, n in wanted) - len(sampled) - len(greedy),
            reasons=tuple(dict.fromkeys(reason for _, reasons in found for reason in reasons)),
        )

    async def _rollouts(
        self, task: Environment, index: int, prompt: Prompt, greedy: bool, n: int
    ) -> tuple[list[Rollout], list[str]]:
        """At most `n` rollouts of the prompt that was asked for as `index`, and why others are missing."""
        handle = self._handles(greedy=greedy, deadline=self._deadline)
        try:
            async with asyncio.timeout_at(self._deadline + SCORING_TIME):
                return await roll_out(task, handle, prompt, n), handle.failures
        except EngineError:
            raise
        except Exception as error:  # the policy for foreign tasks: the prompt is left out, not the evaluation
            log.warning("prompt %d was not evaluated: %s: %s", index, type(error).__name__, error)
            return [], [*handle.failures, f"{type(error).__name__}: {error}"]

    def _counted(self, rollouts: Sequence[Rollout], broken: bool, reasons: list[str]) -> list[Judged]:
        """The judged answers that count; why others do not is added to `reasons`."""
        judged = []
        for rollout in rollouts:
            if reason := (rollout.failure if rollout.masked or broken else None) or self._refusal(rollout):
                reasons.append(reason)
            elif rollout.is_answered:
                judged.append(_judged(rollout))
        return judged

    def _refusal(self, rollout: Rollout) -> str | None:
        """Why an answer is none of the version that is evaluated."""
        spans = (span for each in rollout.completions for span in each.spans)
        other = next((span.version for span in spans if span.version != self._version), None)
        return None if other is None else f"tokens of version {other}, not of {self._version}"


async def evaluate(
    config: Config,
    tasks: Mapping[str, Environment],
    handles: Handles,
    version: PolicyVersion,
    *,
    label: str,
    step: int | None,
    report: Report = silent,
) -> tuple[Evaluation, dict[str, list[Question]]]:
    """Ask, judge and count: the figures, and the questions of each task with all answers.

    version: that every token must be of; `label` and `step`: what it is called; `report`: prompts done, of all. Raises
    EngineError when the server cannot be reached.
    """
    started, began = time.time(), time.monotonic()
    shares = config.evaluate.shares(config.task)
    counts = {share.key: config.evaluate.count(share, fitting_size(tasks[share.key])) for share in shares}
    walk = Walk(config.evaluate, tasks, counts, handles, version, report=report)
    await walk.run()
    unasked = {name: counts[name] - len(questions) for name, questions in walk.questions.items()}
    if not walk.complete:
        left = ", ".join(f"{count} of {name}" for name, count in unasked.items() if count)
        log.warning("evaluate.timeout: %g s are over; not asked: %s", config.evaluate.timeout, left)
    each = config.evaluate.samples + config.evaluate.greedy
    sampling = config.evaluate.sampling(config.generate.sampling)
    evaluation = Evaluation(
        label=label,
        step=step,
        started=started,
        seconds=time.monotonic() - began,
        samples=config.evaluate.samples,
        temperature=sampling.temperature,
        max_new_tokens=sampling.max_new_tokens,
        complete=walk.complete,
        tasks={
            name: figures(questions, config.evaluate.ks, unasked[name], each)
            for name, questions in walk.questions.items()
        },
    )
    return evaluation, walk.questions


def _in_turn(counts: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Prompt 0 of every task, prompt 1 of every task, ...: a deadline then costs all tasks the same."""
    rounds = ([(name, index) for index in range(count)] for name, count in counts.items())
    for places in itertools.zip_longest(*rounds):
        yield from (place for place in places if place is not None)


def _judged(rollout: Rollout) -> Judged:
    completion = rollout.completion
    return Judged(
        text=completion.text,
        passed=rollout.parts.get(EXACT, rollout.reward) >= 1.0 - 1e-9,  # as Sample.passed
        reward=float(rollout.reward),
        parts={name: float(value) for name, value in rollout.parts.items()},
        tokens=sum(map(_written, rollout.completions)),
        finish_reason=completion.finish_reason,
    )


def _written(completion: Completion) -> int:
    """Tokens that the policy wrote."""
    mask = completion.loss_mask
    return len(completion.output_ids) if mask is None else int(np.count_nonzero(mask))

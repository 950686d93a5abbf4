"""From a ticket to its group: the task asks the policy and scores, every sample is checked or replaced.

rollout ─▶ answered, judged, well formed, packable ─▶ Sample, or one for each of its branches
        └▶ Sample.placeholder(failure=...), one of types.FAILURES ─▶ counted in the learner's metrics

A rollout fails as a whole: what one of its branches lacks, no other can make up for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrl import sampling_columns
from streamrl.engine.client import EngineError
from streamrl.generate.inference import EngineInference
from streamrl.generate.moe_routing import shared_prompt_routing
from streamrl.observe.events import EventLog, now
from streamrl.stream.contiguous import arena_of
from streamrl.tasks.asking import find_prompt, roll_out
from streamrl.tasks.environment import Completion, Environment, Prompt, Rollout
from streamrl.tasks.failures import ScorerLate, ScorerLost, ScorerUnready, describe
from streamrl.tasks.overlong import Overlong
from streamrl.tasks.scoring import Scoring, judgements, says_nothing
from streamrl.tasks.weighted import Weighted
from streamrl.trainable import answer_length
from streamrl.types import Group, Sample, Ticket, all_trained

log = logging.getLogger(__name__)

# Seconds after the requests' deadline in which a task scores what came in time; then its samples have failed.
SCORING_TIME = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task gave for a group, or why it gave nothing."""

    rollouts: tuple[Rollout, ...] = ()
    failure: str = ""  # of all samples where there are no rollouts: one of types.FAILURES


async def run_group(
    ticket: Ticket,
    task: Environment,
    inference: EngineInference,
    group_size: int,
    *,
    longest: int,
    temperature: float,
    overlong: Overlong,
    events: EventLog,
    scoring: Scoring | None = None,
    rewards: Weighted | None = None,
) -> Group:
    """The group of `ticket`, always with `group_size` rollouts: one that failed is a placeholder, and is counted.

    A sample of which the learner would read more than `longest` tokens, prompt included, has failed too: no micro batch
    holds it.
    `temperature` is that of the sampling; `overlong` is what a long answer loses of its reward; `scoring` counts the
    answers whose scorer failed; `rewards` are added up to the reward, None: the task's own. At the deadline of
    `inference` the samples that are finished are kept, the others have failed, and the event tells how many tokens each
    had `reached`.

    Raises EngineError when the server cannot be reached, which is the worker's matter, not the sample's, and
    ScorerBroken where the scorer has failed too often.
    """
    fields = {"group_id": ticket.group_id, "attempt": ticket.attempt, "prompt_index": ticket.prompt_index}
    with events.span("group", **fields) as end:
        started = now()
        given = await _outcome(ticket, task, inference, group_size, rewards or Weighted())
        rollouts = [overlong.penalised(each) for each in given.rollouts]
        masked = says_nothing(rollouts)
        made = [
            _samples(each, ticket=ticket, longest=longest, inference=inference, most=task.max_branches, masked=masked)
            for each in rollouts
        ]
        samples = tuple(sample for of_rollout in made for sample in of_rollout)
        samples = shared_prompt_routing(samples) or (Sample.placeholder(failure=given.failure),) * group_size
        group = Group(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            task=ticket.task,
            prompt_index=ticket.prompt_index,
            samples=samples,
            branches=tuple(map(len, made)) if len(samples) > group_size else (),
            images=() if all(sample.is_placeholder for sample in samples) else inference.images,
            arena=arena_of(samples),
            started=started,
            finished=now(),
            worker=events.role,
            temperature=temperature,
        )
        end.update(_end_of(group, rollouts, made, inference))
    if scoring is not None:
        judged = inference.failures[-1:] if given.failure in ("task", "scorer") else judgements(rollouts)
        for failure in scoring.new(each for each in judged if each is not None):
            events.emit("scorer.failed", task=ticket.task, group_id=ticket.group_id, reason=failure)
        scoring.count(ticket.task, judged)
    return group


def _end_of(
    group: Group, rollouts: Sequence[Rollout], made: Sequence[Sequence[Sample]], inference: EngineInference
) -> dict[str, Any]:
    """The fields of a group's event at its end. `made`: the samples of each rollout."""
    failed = Counter(sample.failure for sample in group.samples if sample.is_placeholder)
    unscored = [rollout.failure for rollout in rollouts if rollout.failure is not None]
    fields: dict[str, Any] = {"tokens": group.tokens, "failed": failed.total(), "unscored": len(unscored)}
    if inference.decoded is not None:
        fields["decoded"] = inference.decoded
    if failed or unscored:
        fields["failures"] = dict(failed)
        fields["reasons"] = sorted({*inference.failures, *unscored})[:3]
    if failed:
        fields["reached"] = [
            len(rollout.completion.output_ids)
            for rollout, of_rollout in zip(rollouts, made, strict=True)
            if of_rollout[0].is_placeholder
        ]
    return fields


async def ask(task: Environment, inference: EngineInference, index: int, n: int) -> tuple[Prompt, list[Rollout]]:
    """The prompt of `index` and `n` rollouts of it. Raises as `find_prompt` and `roll_out`."""
    prompt = await find_prompt(task, inference, index)
    return prompt, await roll_out(task, inference, prompt, n)


async def _outcome(
    ticket: Ticket, task: Environment, inference: EngineInference, group_size: int, rewards: Weighted
) -> Outcome:
    """As many rollouts as were asked for, or why there are none."""
    deadline = None if inference.deadline is None else inference.deadline + SCORING_TIME
    try:
        async with asyncio.timeout_at(deadline):
            prompt, given = await ask(task, inference, ticket.prompt_index, group_size)
            rollouts = await rewards.judged(prompt, given)
    except EngineError:
        raise
    except Exception as error:  # the policy for foreign tasks: the group is lost, not the run
        log.exception("group %d: the task failed on prompt %d", ticket.group_id, ticket.prompt_index)
        inference.failures.append(describe(error))
        overdue = deadline is not None and asyncio.get_running_loop().time() >= deadline
        nobody = isinstance(error, (ScorerLate, ScorerLost, ScorerUnready))
        return Outcome(failure="deadline" if overdue else "scorer" if nobody else "task")
    return Outcome(tuple(rollouts))


def _samples(
    rollout: Rollout, *, ticket: Ticket, longest: int, inference: EngineInference, most: int, masked: bool
) -> list[Sample]:
    """The samples of a rollout, `most` of them; a placeholder alone where one is none that can be trained on.

    `masked`: the whole group is.
    """
    answers, prompt_ids = rollout.completions, rollout.completion.prompt_ids
    lost = next((answer for answer in answers if answer.finish_reason == "abort"), None)
    if lost is not None:
        return [Sample.placeholder(prompt_ids, lost.failure or "server")]
    if rollout.masked or masked:
        return [Sample.placeholder(prompt_ids, "scorer")]
    if len(answers) > most or (rollout.branches and inference.images):
        allowed = f"task.max_branches={most}" if len(answers) > most else "1 where the prompt has images"
        inference.failures.append(f"group {ticket.group_id}: a rollout of {len(answers)} branches; allowed: {allowed}")
        return [Sample.placeholder(prompt_ids, "branches")]
    rewards = [rollout.reward if branch.reward is None else branch.reward for branch in rollout.branches]
    worth: list[tuple[float, dict[str, float]]]
    worth = [*((reward, {}) for reward in rewards), (rollout.reward, rollout.parts)]
    samples = [
        _sample(answer, reward, parts, ticket=ticket, longest=longest, inference=inference)
        for answer, (reward, parts) in zip(answers, worth, strict=True)
    ]
    return next(([sample] for sample in samples if sample.is_placeholder), samples)


def _sample(
    answer: Completion,
    reward: float,
    parts: dict[str, float],
    *,
    ticket: Ticket,
    longest: int,
    inference: EngineInference,
) -> Sample:
    """A token sequence as a sample, or a placeholder where it is none that can be trained on."""
    failures = inference.failures
    sample = Sample(
        prompt_ids=answer.prompt_ids,
        output_ids=answer.output_ids,
        logprobs=answer.logprobs,
        loss_mask=all_trained(len(answer.output_ids)) if answer.loss_mask is None else answer.loss_mask,
        spans=answer.spans,
        reward=reward,
        reward_parts=parts,
        finish_reason=answer.finish_reason,
        extras=answer.extras,
    )
    try:
        sample.check(f"group {ticket.group_id}")
        if sample.extras and (problem := sampling_columns.problem(sample)) is not None:
            raise ValueError(f"group {ticket.group_id}: {problem}")
        if (problem := inference.wrong_prompt(sample.prompt_ids)) is not None:
            raise ValueError(f"group {ticket.group_id}: {problem}")
        _check_age(sample, ticket)
    except ValueError as error:
        failures.append(str(error))
        return Sample.placeholder(answer.prompt_ids, "malformed")
    read = answer_length(sample)
    if read is not None and (tokens := len(sample.prompt_ids) + read) > longest:
        where = f"group {ticket.group_id}"
        failures.append(f"{where}: a sequence of {tokens} tokens, learner.tokens_per_micro_batch={longest}")
        return Sample.placeholder(answer.prompt_ids, "too_long")
    return sample


def _check_age(sample: Sample, ticket: Ticket) -> None:
    """The last guard of the staleness bound: no token older than what the ticket was issued for."""
    if sample.oldest is not None and sample.oldest.step < ticket.issued_version.step:
        raise ValueError(
            f"group {ticket.group_id}: tokens of version {sample.oldest}, its ticket needs {ticket.issued_version}"
        )

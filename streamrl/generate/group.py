"""From a ticket to its group: the task asks the policy and scores, every sample is checked or replaced."""

from __future__ import annotations

import asyncio
import logging

from msgspec.structs import replace

from streamrl.engine.client import EngineError
from streamrl.generate.inference import EngineInference
from streamrl.generate.routing import shared_prompt_routing
from streamrl.observe.events import EventLog, now
from streamrl.stream.contiguous import arena_of
from streamrl.tasks.environment import FAILED, Environment, Rollout
from streamrl.tasks.overlong import Overlong
from streamrl.types import Group, Sample, Ticket, all_trained

log = logging.getLogger(__name__)

SCORING_TIME = 10.0
# seconds behind the deadline of the requests in which a task scores what came in time; then its samples have failed.


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
) -> Group:
    """The group of `ticket`, always with `group_size` samples: one that failed is a placeholder, and is counted.

    A sample of more than `longest` tokens, prompt included, has failed too: no micro batch of the learner holds it.
    `temperature` is that of the sampling; `overlong` is what a long answer loses of its reward.
    At the deadline of `inference` the samples that are finished are kept, the others have failed, and the event
    tells how many tokens each had `reached`. Raises EngineError when the server cannot be reached: that is the
    worker's matter, not the sample's.
    """
    fields = {"group_id": ticket.group_id, "attempt": ticket.attempt, "prompt_index": ticket.prompt_index}
    with events.span("group", **fields) as outcome:
        started = now()
        rollouts = [overlong.penalised(each) for each in await _rollouts(ticket, task, inference, group_size)]
        samples = tuple(_sample(rollout, ticket, longest, inference.failures) for rollout in rollouts)
        samples = shared_prompt_routing(samples) or (Sample.placeholder(),) * group_size
        group = Group(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            task=ticket.task,
            prompt_index=ticket.prompt_index,
            samples=samples,
            arena=arena_of(samples),
            started=started,
            finished=now(),
            worker=events.role,
            temperature=temperature,
        )
        failed = sum(sample.is_placeholder for sample in samples)
        unscored = sum(FAILED in sample.reward_parts for sample in samples)
        outcome |= {"tokens": group.tokens, "failed": failed, "unscored": unscored}
        if failed:
            outcome["reasons"] = sorted(set(inference.failures))[:3]
            outcome["reached"] = [
                len(rollout.completion.output_ids)
                for rollout, sample in zip(rollouts, samples, strict=False)  # no rollouts where the task failed
                if sample.is_placeholder
            ]
    return group


async def _rollouts(ticket: Ticket, task: Environment, inference: EngineInference, group_size: int) -> list[Rollout]:
    """As many as were asked for, or none where the task failed."""
    deadline = None if inference.deadline is None else inference.deadline + SCORING_TIME
    try:
        async with asyncio.timeout_at(deadline):
            rollouts = await task.rollout_group(inference, task.prompt(ticket.prompt_index), group_size)
        if len(rollouts) != group_size:
            raise ValueError(f"the task gave {len(rollouts)} rollouts, {group_size} were asked for")
    except EngineError:
        raise
    except Exception as error:  # the policy for foreign tasks: the group is lost, not the run
        log.exception("group %d: the task failed on prompt %d", ticket.group_id, ticket.prompt_index)
        inference.failures.append(f"{type(error).__name__}: {error}")
        return []
    return rollouts


def _sample(rollout: Rollout, ticket: Ticket, longest: int, failures: list[str]) -> Sample:
    """A rollout as a sample, or a placeholder where it is none that can be trained on."""
    answer = rollout.completion
    if answer.finish_reason == "abort":
        return Sample.placeholder(answer.prompt_ids)
    sample = Sample(
        prompt_ids=answer.prompt_ids,
        output_ids=answer.output_ids,
        logprobs=answer.logprobs,
        loss_mask=all_trained(len(answer.output_ids)) if answer.loss_mask is None else answer.loss_mask,
        spans=answer.spans,
        reward=rollout.reward,
        reward_parts=rollout.parts,
        finish_reason=answer.finish_reason,
        extras=answer.extras,
    )
    try:
        sample.check(f"group {ticket.group_id}")
        _check_age(sample, ticket)
        _check_length(sample, ticket, longest)
    except ValueError as error:
        failures.append(str(error))
        return Sample.placeholder(answer.prompt_ids)
    return sample


def _check_age(sample: Sample, ticket: Ticket) -> None:
    """The last guard of the staleness bound: no token older than what the ticket was issued for."""
    if sample.oldest is not None and sample.oldest.step < ticket.issued_version.step:
        raise ValueError(
            f"group {ticket.group_id}: tokens of version {sample.oldest}, its ticket needs {ticket.issued_version}"
        )


def _check_length(sample: Sample, ticket: Ticket, longest: int) -> None:
    tokens = len(sample.prompt_ids) + len(sample.output_ids)
    if tokens > longest:
        raise ValueError(
            f"group {ticket.group_id}: a sequence of {tokens} tokens, learner.tokens_per_micro_batch={longest}"
        )


def as_placeholders(group: Group) -> Group:
    """The same group without its content: every sample a placeholder."""
    return replace(group, samples=(Sample.placeholder(),) * len(group.samples))

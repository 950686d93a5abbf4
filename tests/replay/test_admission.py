"""What the replay service refuses at its door: each group costs its ticket an attempt, and the run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from service_parts import RUN, V0, MakeGroup, Running, answer, make_config, receive, receive_tickets

from streamrl.replay.admission import Admission
from streamrl.replay.buffer import make_buffer
from streamrl.stream.codec import encode_group
from streamrl.stream.messages import Accepted, Hello, Refused, Tickets, Welcome
from streamrl.trainable import Limits, untrainable
from streamrl.types import Group, PolicyVersion, VersionSpan

LIMITS = Limits(vocabulary=1000, tokens=64)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose learner has told its limits."""
    config = make_config(
        run={"steps": 99},
        replay={"groups_per_step": 50, "max_staleness": 1, "max_attempts": 99},
        journal={"keep": "none"},
    )
    service = Running(config, tmp_path_factory.mktemp("run"))
    service.learner_socket = service.peer(Hello(run=RUN, role="learner", name="learner-0", version=V0, limits=LIMITS))
    receive(service.learner_socket, Welcome)
    service.worker_socket = service.worker(capacity=1)
    yield service
    service.close()


def tokens(group: Group, **fields: Any) -> Group:
    """The group with other fields in its first sample."""
    return replace(group, samples=(replace(group.samples[0], **fields), *group.samples[1:]))


def with_id(group: Group, token: int) -> Group:
    return tokens(group, output_ids=np.full(5, token, np.int32))


def with_logprob(group: Group, value: float) -> Group:
    return tokens(group, logprobs=np.array([-1, -1, value, -1, -1], np.float32))


def long(group: Group, length: int) -> Group:
    """An answer of this many tokens behind the prompt of 7."""
    return tokens(
        group,
        output_ids=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        loss_mask=np.ones(length, np.bool_),
        spans=(VersionSpan(V0, 0, length),),
    )


def of_version(group: Group, version: PolicyVersion) -> Group:
    return tokens(group, spans=(VersionSpan(version, 0, 5),))


BAD: dict[str, tuple[Callable[[Group], Group], str]] = {
    "one sample": (lambda group: replace(group, samples=group.samples[:1]), "1 samples, generate.group_size=2"),
    "400 samples": (lambda group: replace(group, samples=group.samples * 200), "400 samples"),
    "an unknown token": (lambda group: with_id(group, 1000), "a token id is not below the vocabulary of 1000"),
    "a negative token": (lambda group: with_id(group, -1), "a token id is not below the vocabulary of 1000"),
    "an unknown token in the prompt": (
        lambda group: tokens(group, prompt_ids=np.array([5, 1 << 20], np.int32)),
        "a token id is not below",
    ),
    "a sample longer than a row": (lambda group: long(group, 59), "65 tokens, learner.tokens_per_micro_batch=64"),
    "a log-prob that is no number": (lambda group: with_logprob(group, math.nan), "log-prob is not finite"),
    "an infinite log-prob": (lambda group: with_logprob(group, -math.inf), "log-prob is not finite"),
    "an empty prompt": (lambda group: tokens(group, prompt_ids=np.zeros(0, np.int32)), "has an empty prompt"),
    "a version from the future": (
        lambda group: of_version(group, PolicyVersion(7)),
        "tokens of version 7.0, which was never published",
    ),
    "an incarnation that never was": (
        lambda group: of_version(group, PolicyVersion(0, incarnation=3)),
        "tokens of version 0.3, which was never published",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_group_that_cannot_be_trained_is_refused_and_its_ticket_issued_again(
    running: Running, make_group: MakeGroup, kind: str
) -> None:
    spoil, reason = BAD[kind]
    (ticket,) = receive_tickets(running.worker_socket, 1)
    good = make_group(ticket.group_id, attempt=ticket.attempt, version=V0)
    running.worker_socket.send(spoil(good))
    refused = receive(running.worker_socket, Refused)
    assert reason in refused.reason
    (again,) = receive_tickets(running.worker_socket, 1)
    assert (again.group_id, again.attempt) == (ticket.group_id, ticket.attempt + 1)
    assert isinstance(answer(running.worker_socket, make_group, again), Accepted)


def test_what_is_not_trained_needs_no_log_prob(running: Running, make_group: MakeGroup) -> None:
    (ticket,) = receive_tickets(running.worker_socket, 1)
    group = with_logprob(make_group(ticket.group_id, attempt=ticket.attempt, version=V0), math.nan)
    running.worker_socket.send(tokens(group, loss_mask=np.array([True, True, False, True, True])))
    while isinstance(message := running.worker_socket.receive(20), Tickets):
        pass
    assert isinstance(message, Accepted)


def test_the_longest_sample_that_a_row_holds_is_taken(running: Running, make_group: MakeGroup) -> None:
    """The last token of an answer is read by nobody."""
    (ticket,) = receive_tickets(running.worker_socket, 1)
    running.worker_socket.send(long(make_group(ticket.group_id, attempt=ticket.attempt, version=V0), 58))
    while isinstance(message := running.worker_socket.receive(20), Tickets):
        pass
    assert isinstance(message, Accepted)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"parts": [{"exact": float("nan")}] * 2}, "a reward part is not finite"),
        ({"parts": [{"exact": float("-inf")}] * 2}, "a reward part is not finite"),
        ({"rewards": [1.0, float("nan")]}, "a reward is not finite"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_as_malformed(
    running: Running, make_group: MakeGroup, spoil: dict[str, Any], reason: str
) -> None:
    """By a worker that does not check what it sends."""
    (ticket,) = receive_tickets(running.worker_socket, 1)
    header, arena = encode_group(make_group(ticket.group_id, attempt=ticket.attempt, version=V0), 1 << 20)
    fields = {**msgspec.msgpack.decode(header), **spoil}
    running.worker_socket._send([msgspec.msgpack.encode(fields), arena])
    assert reason in receive(running.worker_socket, Refused).reason
    (again,) = receive_tickets(running.worker_socket, 1)
    assert isinstance(answer(running.worker_socket, make_group, again), Accepted)


def test_no_worker_sends_a_reward_part_that_is_not_finite(make_group: MakeGroup) -> None:
    with pytest.raises(ValueError, match=r"reward_parts\['exact'\] is nan, a finite number is needed"):
        encode_group(tokens(make_group(1), reward_parts={"exact": float("nan")}), 1 << 20)


def test_a_version_that_was_announced_may_come_before_its_server_reports_it(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    buffer, admission = make_buffer(make_config()), Admission(group_size=2)
    newer = make_group(0, version=PolicyVersion(1))
    buffer.acknowledge(V0)
    assert admission.problem(newer, buffer) is not None
    admission.announce(PolicyVersion(1))
    assert admission.problem(newer, buffer) is None


def test_a_group_has_its_rollouts_and_none_has_more_branches_than_are_allowed(make_group: MakeGroup) -> None:
    buffer, admission = make_buffer(make_config()), Admission(group_size=2, max_branches=3)
    buffer.acknowledge(V0)
    group = make_group(0, samples=4)
    for branches, reason in (
        ((), "4 samples, generate.group_size=2"),
        ((1, 3), None),
        ((2, 1, 1), "3 rollouts, generate.group_size=2"),
    ):
        assert admission.problem(replace(group, branches=branches), buffer) == reason
    many = replace(make_group(0, samples=5), branches=(1, 4))
    assert admission.problem(many, buffer) == "a rollout of 4 branches, task.max_branches=3"


def test_tokens_that_are_not_trained_need_no_row(make_group: MakeGroup) -> None:
    group = tokens(make_group(0, tokens=80), loss_mask=np.arange(80) < 50)
    group = replace(group, samples=(group.samples[0], make_group(0).samples[1]))
    assert untrainable(group, LIMITS) is None
    assert untrainable(group.emptied, Limits(vocabulary=1, tokens=1)) is None

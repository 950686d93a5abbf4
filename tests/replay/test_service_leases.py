"""Workers that fall silent, come back, vanish, or never answer: what becomes of their tickets."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from service_parts import WAIT, MakeGroup, Running, answer, hear, hear_tickets

from streamrl.stream.messages import Accepted, Bye, Credit, Heartbeat, Introduce, Next, Refused, Tickets
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import Ticket
from tests.operations_table import GOES_ON, documented


def beat_until_tickets(dealer: Dealer, count: int) -> list[Ticket]:
    """Heartbeats without names, until that many tickets have come."""
    tickets: list[Ticket] = []
    deadline = time.monotonic() + WAIT
    while len(tickets) < count and time.monotonic() < deadline:
        dealer.send(Heartbeat())
        message = dealer.receive(0.05)
        tickets += message.tickets if isinstance(message, Tickets) else ()
    return tickets


def test_a_lease_that_is_over_gives_the_ticket_to_another_and_the_late_group_is_refused(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(replay={"lease": 1.0})
    lost, heir = running.worker("lost", capacity=4), running.worker("heir", capacity=0)
    running.learner()
    tickets = hear_tickets(lost, 4)
    lost.send(Credit(capacity=0))
    heir.send(Credit(capacity=4))
    again = beat_until_tickets(heir, 4)
    assert [(t.group_id, t.attempt) for t in again] == [(t.group_id, 1) for t in tickets]
    late = answer(lost, make_group, tickets[0])
    assert isinstance(late, Refused)
    assert isinstance(answer(heir, make_group, again[0]), Accepted)
    assert len(running.told("ticket.expired")) == 4


def test_a_silent_worker_keeps_its_tickets_for_their_lease(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(generate={"heartbeat": 0.02}, replay={"lease": 60.0})
    worker = running.worker()
    running.learner()
    ticket = hear_tickets(worker, 4)[0]
    deadline = time.monotonic() + WAIT
    while not running.told("worker.silent") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert isinstance(answer(worker, make_group, ticket), Accepted)
    assert not running.told("ticket.expired")


def test_heartbeats_that_name_a_ticket_extend_its_lease(start: Callable[..., Running]) -> None:
    running = start(replay={"lease": 1.0})
    worker = running.worker()
    running.learner()
    tickets = hear_tickets(worker, 4)
    named = tuple((t.group_id, t.attempt) for t in tickets[:3])
    deadline = time.monotonic() + WAIT
    again: list[Ticket] = []
    while not again and time.monotonic() < deadline:
        worker.send(Heartbeat(tickets=named))
        message = worker.receive(0.05)
        again += message.tickets if isinstance(message, Tickets) else ()
    assert [(t.group_id, t.attempt) for t in again] == [(3, 1)]


def test_a_worker_that_says_bye_or_comes_back_as_a_new_process_loses_its_tickets_at_once(
    start: Callable[..., Running],
) -> None:
    running = start()
    first = running.worker("w")
    running.learner()
    hear_tickets(first, 4)
    second = running.worker("w")
    assert [t.attempt for t in hear_tickets(second, 4)] == [1] * 4
    second.send(Bye())
    third = running.worker("other")
    assert [t.attempt for t in hear_tickets(third, 4)] == [2] * 4


def test_what_a_drained_worker_hands_back_is_issued_again_however_often_and_what_a_failed_one_left_is_not(
    start: Callable[..., Running],
) -> None:
    running = start(replay={"max_attempts": 1})
    running.learner()
    for attempt in range(3):
        worker = running.worker(f"w{attempt}")
        assert [ticket.attempt for ticket in hear_tickets(worker, 4)] == [attempt] * 4
        if attempt < 2:
            worker.send(Credit(capacity=0))
        worker.send(Bye())
    deadline = time.monotonic() + WAIT
    while len(running.told("group.placeholders")) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [event["attempt"] for event in running.told("group.placeholders")] == [2] * 4


def test_a_worker_that_reconnects_keeps_the_tickets_that_it_names(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    before = running.worker("w")
    running.learner()
    tickets = hear_tickets(before, 4)
    kept = tuple((t.group_id, t.attempt) for t in tickets[:3])
    after = running.worker("w", tickets=kept)
    assert [(t.group_id, t.attempt) for t in hear_tickets(after, 1)] == [(3, 1)]
    for ticket in tickets[:3]:
        assert isinstance(answer(after, make_group, ticket), Accepted)


def test_a_worker_that_outlives_the_service_keeps_the_leases_that_it_names(start: Callable[..., Running]) -> None:
    first = start(replay={"lease": 1.0})
    worker = first.worker()
    first.learner()
    tickets = tuple((t.group_id, t.attempt) for t in hear_tickets(worker, 4))
    first.close()
    second = start(replay={"lease": 1.0})
    worker = second.worker(tickets=tickets[:3])
    second.learner()
    deadline = time.monotonic() + WAIT
    while not second.told("ticket.expired") and time.monotonic() < deadline:
        worker.send(Heartbeat(tickets=tickets[:3]))
        worker.receive(0.05)
    assert [event["group_id"] for event in second.told("ticket.expired")] == [3]


def test_a_group_that_is_sent_twice_is_accepted_twice_and_kept_once(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker, learner = running.worker(), running.learner()
    for ticket in hear_tickets(worker, 4):
        assert isinstance(answer(worker, make_group, ticket), Accepted)
        assert isinstance(answer(worker, make_group, ticket), Accepted)
    learner.send(Next(step=0))
    received = hear(learner, ReceivedBatch)
    assert received.stats["tokens_generated"] == 40
    assert received.stats["groups"] == 2
    assert len(running.told("group.duplicate")) == 4


def test_a_prompt_that_nobody_answers_ends_as_placeholders_and_the_step_is_made(
    start: Callable[..., Running], make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    running = start(replay={"lease": 0.3, "max_attempts": 2}, generate={"group_size": 3, "heartbeat": 0.1})
    worker, learner = running.worker(capacity=99), running.learner()
    learner.send(Next(step=0))
    received = None
    while received is None:
        message = worker.receive(0.05)
        for ticket in message.tickets if isinstance(message, Tickets) else ():
            if ticket.group_id != 1:  # the poisonous prompt
                group = make_group(ticket.group_id, attempt=ticket.attempt, version=ticket.issued_version, samples=3)
                worker.send_group(group)
        received = learner.receive(0.05)
    assert isinstance(received, ReceivedBatch)
    good, poisoned = received.batch.groups
    assert (good.group_id, poisoned.group_id) == (0, 1)
    assert not any(sample.is_placeholder for sample in good.samples)
    assert [sample.failure for sample in poisoned.samples] == ["lost"] * 3
    assert received.stats["selection"]["selection/placeholders"] == 1
    assert [event["attempt"] for event in running.told("group.placeholders")] == [1]
    documented("group ... is given up after attempt ...: placeholders", caplog.text, GOES_ON)


def test_a_gap_in_a_workers_words_is_answered_by_introduce(start: Callable[..., Running]) -> None:
    running = start()
    worker = running.worker(capacity=0)
    running.learner()
    worker._numbers._said += 3  # three words that never arrived
    worker.send(Heartbeat())
    hear(worker, Introduce)
    assert [event["messages"] for event in running.told("replay.missed")] == [3]

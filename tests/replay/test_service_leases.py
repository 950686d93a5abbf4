"""Workers that fall silent, come back, vanish, or never answer: what becomes of their tickets."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from service_parts import RUN, V0, WAIT, Clock, MakeGroup, Running, ServiceProcess, answer, receive, receive_tickets

from streamrl.replay.service import BURST
from streamrl.stream.messages import (
    Accepted,
    Bye,
    Credit,
    Heartbeat,
    Hello,
    Introduce,
    Next,
    Refused,
    ServerState,
    Stop,
    Tickets,
)
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.types import Ticket
from tests.operations_table import GOES_ON, documented


def beat_until_tickets(
    clock: Clock, dealer: Dealer, count: int, named: tuple[tuple[int, int], ...] = ()
) -> list[Ticket]:
    """Heartbeats that name these, while time passes, until that many tickets have come."""
    tickets: list[Ticket] = []
    deadline = time.monotonic() + WAIT
    while len(tickets) < count and time.monotonic() < deadline:
        dealer.send(Heartbeat(tickets=named))
        clock.now += 0.1
        message = dealer.receive(0.05)
        tickets += message.tickets if isinstance(message, Tickets) else ()
    return tickets


def test_a_lease_that_is_over_gives_the_ticket_to_another_and_the_late_group_is_refused(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    clock = Clock()
    running = start(clock, replay={"lease": 1.0}, journal={"commit_seconds": 0.0})
    lost, heir = running.worker("lost", capacity=4), running.worker("heir", capacity=0)
    running.learner()
    tickets = receive_tickets(lost, 4)
    lost.send(Credit(capacity=0))
    heir.send(Credit(capacity=4))
    again = beat_until_tickets(clock, heir, 4)
    assert [(t.group_id, t.attempt) for t in again] == [(t.group_id, 1) for t in tickets]
    late = answer(lost, make_group, tickets[0])
    assert isinstance(late, Refused)
    assert isinstance(answer(heir, make_group, again[0]), Accepted)
    assert len(running.events_of("ticket.expired")) == 4


def test_a_silent_worker_keeps_its_tickets_for_their_lease(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(generate={"heartbeat": 0.02}, replay={"lease": 60.0})
    worker = running.worker()
    running.learner()
    ticket = receive_tickets(worker, 4)[0]
    deadline = time.monotonic() + WAIT
    while not running.events_of("worker.silent") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert isinstance(answer(worker, make_group, ticket), Accepted)
    assert not running.events_of("ticket.expired")


def test_heartbeats_that_name_a_ticket_extend_its_lease(start: Callable[..., Running]) -> None:
    clock = Clock()
    running = start(clock, replay={"lease": 1.0})
    worker = running.worker()
    running.learner()
    tickets = receive_tickets(worker, 4)
    named = tuple((t.group_id, t.attempt) for t in tickets[:3])
    again = beat_until_tickets(clock, worker, 1, named)
    assert [(t.group_id, t.attempt) for t in again] == [(3, 1)]


def test_a_worker_that_says_bye_or_comes_back_as_a_new_process_loses_its_tickets_at_once(
    start: Callable[..., Running],
) -> None:
    running = start()
    first = running.worker("w")
    running.learner()
    receive_tickets(first, 4)
    first.close()
    second = running.worker("w")
    assert [t.attempt for t in receive_tickets(second, 4)] == [1] * 4
    second.send(Bye())
    third = running.worker("other")
    assert [t.attempt for t in receive_tickets(third, 4)] == [2] * 4


def test_what_a_drained_worker_hands_back_is_issued_again_however_often_and_what_a_failed_one_left_is_not(
    start: Callable[..., Running],
) -> None:
    running = start(replay={"max_attempts": 1})
    running.learner()
    for attempt in range(3):
        worker = running.worker(f"w{attempt}")
        assert [ticket.attempt for ticket in receive_tickets(worker, 4)] == [attempt] * 4
        if attempt < 2:
            worker.send(Credit(capacity=0))
        worker.send(Bye())
    deadline = time.monotonic() + WAIT
    while len(running.events_of("group.placeholders")) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [event["attempt"] for event in running.events_of("group.placeholders")] == [3] * 4  # their own


def test_a_worker_that_reconnects_keeps_the_tickets_that_it_names(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    before = running.worker("w")
    running.learner()
    tickets = receive_tickets(before, 4)
    kept = tuple((t.group_id, t.attempt) for t in tickets[:3])
    before.close()
    after = running.worker("w", tickets=kept)
    assert [(t.group_id, t.attempt) for t in receive_tickets(after, 1)] == [(3, 1)]
    for ticket in tickets[:3]:
        assert isinstance(answer(after, make_group, ticket), Accepted)


def test_a_worker_that_outlives_the_service_keeps_the_leases_that_it_names(start: Callable[..., Running]) -> None:
    clock = Clock()
    first = start(clock, replay={"lease": 1.0})
    worker = first.worker()
    first.learner()
    tickets = tuple((t.group_id, t.attempt) for t in receive_tickets(worker, 4))
    first.close()
    second = start(clock, replay={"lease": 1.0})
    worker = second.worker(tickets=tickets[:3])
    second.learner()
    assert [t.group_id for t in beat_until_tickets(clock, worker, 1, tickets[:3])] == [3]
    assert [event["group_id"] for event in second.events_of("ticket.expired")] == [3]


def test_a_group_that_is_sent_twice_is_accepted_twice_and_kept_once(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start()
    worker, learner = running.worker(), running.learner()
    for ticket in receive_tickets(worker, 4):
        assert isinstance(answer(worker, make_group, ticket), Accepted)
        assert isinstance(answer(worker, make_group, ticket), Accepted)
    learner.send(Next(step=0))
    received = receive(learner, ReceivedBatch)
    assert received.stats["tokens_generated"] == 40
    assert received.stats["groups"] == 2
    assert len(running.events_of("group.duplicate")) == 4


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
                worker.send(group)
        received = learner.receive(0.05)
    assert isinstance(received, ReceivedBatch)
    good, poisoned = received.batch.groups
    assert (good.group_id, poisoned.group_id) == (0, 1)
    assert not any(sample.is_placeholder for sample in good.samples)
    assert [sample.failure for sample in poisoned.samples] == ["lost"] * 3
    assert received.stats["selection"]["selection/placeholders"] == 1
    assert [event["attempt"] for event in running.events_of("group.placeholders")] == [2]  # of its own
    documented("group ... is given up after attempt ...: placeholders", caplog.text, GOES_ON)


def test_a_second_worker_of_a_name_is_refused_while_the_first_speaks(start: Callable[..., Running]) -> None:
    running = start()
    first = running.worker("w")
    running.learner()
    tickets = {(ticket.group_id, ticket.attempt) for ticket in receive_tickets(first, 4)}
    second = running.worker("w")
    receive(first, Introduce)
    deadline = time.monotonic() + WAIT
    stop = None
    while stop is None and time.monotonic() < deadline:  # both speak, as workers do
        first.send(Heartbeat(tickets=tuple(tickets)))
        second.send(Heartbeat())
        message = second.receive(0.1)
        if isinstance(message, Introduce):
            second.send(Hello(run=RUN, role="generator", name="w", servers=(ServerState(name="w-server", version=V0),)))
        stop = message if isinstance(message, Stop) else None
    assert stop is not None
    assert stop.refused
    assert stop.reason == "a worker w is at work already; allowed: one of each name, so another --index for this one"
    documented("... is at work already; allowed: one of each name, so another --index for this one", stop.reason, 2)
    assert not running.events_of("worker.replaced")
    assert not running.events_of("ticket.expired")


def test_a_worker_that_fell_silent_is_replaced_by_the_one_that_waits_for_its_name(
    start: Callable[..., Running],
) -> None:
    """Its host is cut off: the connection stays open, and nothing comes over it."""
    running = start(generate={"heartbeat": 0.1})
    first = running.worker("w")
    running.learner()
    receive_tickets(first, 4)
    second = running.worker("w")
    deadline = time.monotonic() + WAIT
    again: list[Ticket] = []
    while not again and time.monotonic() < deadline:
        second.send(Heartbeat())
        message = second.receive(0.1)
        if isinstance(message, Introduce):
            second.send(Hello(run=RUN, role="generator", name="w", servers=(ServerState(name="w-server", version=V0),)))
            second.send(Credit(capacity=4))
        again += message.tickets if isinstance(message, Tickets) else ()
    assert [ticket.attempt for ticket in again] == [1] * 4
    assert len(running.events_of("worker.replaced")) == 1


def test_what_was_sent_while_the_service_was_in_a_long_fsync_is_read_before_leases_end(
    start: Callable[..., Running], make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More words than the service reads at once wait for it, and those that extend the leases are the last."""
    running = start(replay={"lease": 1.0}, journal={"commit_seconds": 0.0})
    worker = running.worker()
    running.learner()
    tickets = receive_tickets(worker, 4)
    fsync, slow = os.fdatasync, threading.Event()

    def fdatasync(file: int) -> None:
        if slow.is_set():
            slow.clear()
            time.sleep(2.0)
        fsync(file)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    slow.set()
    worker.send(make_group(0))
    while slow.is_set():
        time.sleep(0.005)
    for _ in range(BURST):
        worker.send(Heartbeat())
    named = tuple((ticket.group_id, ticket.attempt) for ticket in tickets[1:])
    deadline = time.monotonic() + 4.0  # longer than the pause and a lease together
    while time.monotonic() < deadline:
        worker.send(Heartbeat(tickets=named))
        time.sleep(0.1)
    assert not running.events_of("ticket.expired")


def test_a_stopped_service_reads_its_workers_words_before_their_leases_end(
    start_process: Callable[..., ServiceProcess],
) -> None:
    """SIGSTOP for longer than a lease, then SIGCONT: its own absence counts against nobody."""
    service = start_process(replay={"lease": 5.0})
    peers = [Dealer(service.address, service.config.stream, name=name) for name in ("learner-0", "w")]
    learner, worker = peers
    try:
        learner.send(Hello(run=RUN, role="learner", name="learner-0", version=V0))
        worker.send(Hello(run=RUN, role="generator", name="w", servers=(ServerState(name="s", version=V0),)))
        worker.send(Credit(capacity=4))
        named = tuple((ticket.group_id, ticket.attempt) for ticket in receive_tickets(worker, 4))
        for _ in range(3):
            worker.send(Heartbeat(tickets=named))
            time.sleep(0.3)
            service.process.send_signal(signal.SIGSTOP)
            time.sleep(5.5)
            service.process.send_signal(signal.SIGCONT)
            for _ in range(5):
                worker.send(Heartbeat(tickets=named))
                time.sleep(0.1)
        assert not service.events_of("ticket.expired")
        assert not service.events_of("worker.silent")
    finally:
        for peer in peers:
            peer.close()


def test_a_gap_in_a_workers_words_is_answered_by_introduce(start: Callable[..., Running]) -> None:
    running = start()
    worker = running.worker(capacity=0)
    running.learner()
    worker._numbers._sent += 3  # three words that never arrived
    worker.send(Heartbeat())
    receive(worker, Introduce)
    assert [event["messages"] for event in running.events_of("replay.missed")] == [3]

"""What the learner quarantines, and what has rotted on the disk, through the real service, its journal and its wire."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace
from service_parts import RUN, V0, WAIT, MakeGroup, Running, ServiceProcess, answer, ids, receive, receive_tickets
from test_service_recovery import flip_a_byte

from streamrl.replay.journal import recorded_batches
from streamrl.replay.records import Place
from streamrl.replay.segments import JournalDamaged, _read_entry, load_frames, segment_path
from streamrl.stream.messages import (
    Accepted,
    Applied,
    Credit,
    Hello,
    Lost,
    Next,
    Quarantined,
    Refused,
    Saved,
    ServerState,
)
from streamrl.stream.sockets import Dealer, ReceivedBatch
from streamrl.trainable import Limits
from streamrl.types import Ledger, PolicyVersion

REASON = "IndexError: index out of range in self"


def deliver(learner: Dealer, step: int) -> ReceivedBatch:
    learner.send(Next(step=step))
    return receive(learner, ReceivedBatch)


def emptied(received: ReceivedBatch) -> list[bool]:
    return [not group.answered for group in received.batch.groups]


def quarantine(running: Running, learner: Dealer, step: int, group_id: int) -> None:
    learner.send(Quarantined(step=step, group_id=group_id, attempt=0, reason=REASON))


def trained(running: Running, make_group: MakeGroup, last: int) -> tuple[Dealer, Dealer, list[Ledger | None]]:
    """A worker, a learner that was delivered the steps up to `last`, and the ledger at each step."""
    worker, learner, publisher = running.worker(), running.learner(), running.publisher()
    ledgers: list[Ledger | None] = [None]
    for step in range(last + 1):
        for ticket in receive_tickets(worker, 4 if step == 0 else 2):
            answer(worker, make_group, ticket)
        ledgers.append(deliver(learner, step).ledger)
        running.announce(PolicyVersion(step + 1), publisher=publisher)
        worker.send(Applied(server="w-server", version=PolicyVersion(step + 1)))
    return worker, learner, ledgers


def test_a_quarantined_group_comes_as_placeholders_ever_after(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    """To the learner that asks again, to the one behind it, and to the one of the next service."""
    running = start(run={"steps": 9})
    _, learner, _ = trained(running, make_group, 1)
    quarantine(running, learner, 1, 3)
    again = deliver(learner, 1)
    assert (ids(again), emptied(again), again.batch.quarantined) == ([2, 3], [False, True], {3})
    assert again.ledger.quarantined == {3: 0}
    (event,) = running.events_of("group.quarantined")
    assert (event["step"], event["group_id"], event["reason"]) == (1, 3, REASON)
    restored = running.learner(PolicyVersion(0, incarnation=1))
    assert emptied(deliver(restored, 0)) == [False, False]
    assert emptied(deliver(restored, 1)) == [False, True]
    running.close()

    following = start(run={"steps": 9})
    learner = following.learner(PolicyVersion(0, incarnation=2))
    assert emptied(deliver(learner, 0)) == [False, False]
    last = deliver(learner, 1)
    assert (emptied(last), last.batch.quarantined, last.ledger.quarantined) == ([False, True], {3}, {3: 0})


def test_the_recorded_batch_is_the_one_that_was_trained(start: Callable[..., Running], make_group: MakeGroup) -> None:
    running = start(run={"steps": 9})
    _, learner, _ = trained(running, make_group, 1)
    quarantine(running, learner, 1, 3)
    deliver(learner, 1)
    running.close()
    recorded = list(recorded_batches(running.folder / "journal"))
    assert [batch.quarantined for batch in recorded] == [frozenset(), {3}]
    assert [[bool(group.answered) for group in batch.groups] for batch in recorded] == [[True, True], [True, False]]


def test_a_quarantine_of_a_step_that_is_not_there_changes_nothing(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    running = start(run={"steps": 9})
    _, learner, _ = trained(running, make_group, 0)
    for step, group_id in ((0, 3), (5, 0), (0, 1 << 40)):
        quarantine(running, learner, step, group_id)
    assert emptied(deliver(learner, 0)) == [False, False]
    assert running.events_of("group.quarantined") == []


def test_rot_that_is_found_when_checkpoints_have_moved_on_costs_its_groups_alone(
    start: Callable[..., Running], make_group: MakeGroup
) -> None:
    """Two groups of one batch, behind a learner whose own start is before the oldest checkpoint."""
    running = start(run={"steps": 30}, journal={"keep": "resume"})
    trained(running, make_group, 5)
    running.close()

    following = start(run={"steps": 30}, journal={"keep": "resume"})
    worker = following.worker(version=PolicyVersion(6))
    learner = following.learner(PolicyVersion(0, incarnation=1))
    for segment in (following.folder / "journal").glob("*.journal"):
        content = segment.read_bytes()
        for group_id in (10, 11):
            try:
                flip_a_byte(segment, make_group(group_id, version=PolicyVersion(group_id // 2 - 1)))
            except ValueError:  # it is not in this segment
                assert content == segment.read_bytes()
    for step in range(5):
        assert ids(deliver(learner, step)) == [2 * step, 2 * step + 1]
    learner.send(Saved(version=PolicyVersion(4), oldest=4))
    learner.send(Next(step=5))
    assert receive(learner, Lost).step == 5
    again = receive_tickets(worker, 2)
    assert [(ticket.group_id, ticket.attempt, ticket.prompt_index) for ticket in again] == [(10, 1, 10), (11, 1, 11)]
    for ticket in again:
        answer(worker, make_group, ticket, version=PolicyVersion(6))
    assert ids(receive(learner, ReceivedBatch)) == [10, 11]
    assert ids(deliver(learner, 6)) == [12, 13]


def test_a_record_that_is_another_groups_is_damage(start: Callable[..., Running], make_group: MakeGroup) -> None:
    """The bytes of two whole records have changed places: every checksum holds."""
    running = start(run={"steps": 9}, journal={"segment": 1 << 12})
    worker, learner, _ = trained(running, make_group, 3)
    receive_tickets(worker, 2)
    slots = running.service._durable.buffer.snapshot().slots
    here, there = (next(slot.place for slot in slots if slot.group_id == group_id) for group_id in (0, 1))
    assert isinstance(here, Place)
    assert isinstance(there, Place)
    _exchange(running.folder / "journal", here, there)
    with pytest.raises(JournalDamaged, match="is not that of group 0"):
        load_frames(running.folder / "journal", here, (0, 0))
    learner = running.learner(PolicyVersion(0, incarnation=1))
    learner.send(Next(step=0))
    assert receive(learner, Lost).step == 0
    again = receive_tickets(worker, 2)
    assert [(ticket.group_id, ticket.attempt) for ticket in again] == [(0, 1), (1, 1)]
    for ticket in again:
        answer(worker, make_group, ticket)
    assert ids(receive(learner, ReceivedBatch)) == [0, 1]


def _exchange(folder: Path, one: Place, other: Place) -> None:
    """Swap the bytes of two records of one length."""
    path = segment_path(folder, one.segment)
    assert one.segment == other.segment
    with path.open("r+b") as file:
        parts = []
        for place in (one, other):
            file.seek(place.offset)
            entry = _read_entry(file, place, path.stat().st_size)
            file.seek(place.offset)
            parts.append(file.read(entry.end - place.offset))  # type: ignore[union-attr]
        assert len(parts[0]) == len(parts[1])
        for place, content in zip((one, other), reversed(parts), strict=True):
            file.seek(place.offset)
            file.write(content)


def test_the_limits_that_a_learner_told_are_known_to_the_next_service(
    start_process: Callable[..., ServiceProcess], make_group: MakeGroup
) -> None:
    service = start_process(run={"steps": 9})
    learner = Dealer(service.address, service.config.stream, name="learner-0")
    worker = Dealer(service.address, service.config.stream, name="w")
    try:
        learner.send(
            Hello(run=RUN, role="learner", name="learner-0", version=V0, limits=Limits(vocabulary=1000, tokens=9))
        )
        learner.receive(WAIT)
        hello = Hello(run=RUN, role="generator", name="w", servers=(ServerState(name="s", version=V0),))
        worker.send(hello)
        worker.send(Credit(capacity=2))
        first, ticket = receive_tickets(worker, 2)
        answered = answer(worker, partial(make_group, tokens=2), first)
        assert isinstance(answered, Accepted)  # it is on the disk, and all that came before
        service.kill()
        service.start()
        worker.send(replace(hello, tickets=((ticket.group_id, ticket.attempt),)))
        worker.send(make_group(ticket.group_id, tokens=6))
        assert "12 tokens, learner.tokens_per_micro_batch=9" in receive(worker, Refused).reason
    finally:
        learner.close()
        worker.close()

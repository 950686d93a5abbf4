"""The buffer under every schedule that hypothesis finds, and its rules one by one."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace
from replay_schedule import Schedule, answer, placeholder

from streamrl.config import Config
from streamrl.replay.adaptive import AdaptiveBound
from streamrl.replay.buffer import Buffer, make_buffer
from streamrl.replay.life import Phase
from streamrl.replay.orders.fifo import Fifo
from streamrl.replay.records import Began, Completed, Place, Snapshot
from streamrl.replay.refusals import DuplicateGroup, GroupRefused
from streamrl.types import Ledger, PolicyVersion, Ticket

NEW = PolicyVersion(0)
SCHEDULES = settings(max_examples=250, stateful_step_count=50, suppress_health_check=list(HealthCheck), database=None)
FIRST_FAILURE = settings(SCHEDULES, max_examples=1000, phases=[HypothesisPhase.generate], report_multiple_bugs=False)


def buffer_of(**replay: Any) -> Buffer:
    """A buffer of steps of four groups that has begun with fresh weights on a server."""
    steps = replay.pop("steps", 9)
    config = {"run": {"steps": steps}, "replay": {"groups_per_step": 4, "max_staleness": 1} | replay}
    buffer = make_buffer(Config.model_validate(config))
    buffer.begin(NEW)
    buffer.acknowledge(NEW)
    return buffer


def issue_all(buffer: Buffer, worker: str = "a", version: PolicyVersion = NEW, now: float = 0.0) -> list[Ticket]:
    tickets = []
    while (ticket := buffer.issue(worker, version, now)) is not None:
        tickets.append(ticket)
    return tickets


def complete(buffer: Buffer, tickets: list[Ticket], version: PolicyVersion = NEW, worker: str = "a") -> None:
    for ticket in tickets:
        assert buffer.complete(worker, answer(ticket, version), (b"header", b"arena"), 11) is not None


def train(buffer: Buffer, step: int, version: PolicyVersion | None = None) -> list[int]:
    """One step in which everything is answered and published."""
    version = version or PolicyVersion(step)
    complete(buffer, issue_all(buffer, version=version), version)
    batch = buffer.pop(step)
    assert batch is not None
    buffer.acknowledge(PolicyVersion(step + 1))
    return [stored.group_id for stored in batch]


def written(buffer: Buffer) -> list[Any]:
    """The journal of a buffer: its records, with a place for every group."""
    journal: list[Any] = []
    for record in buffer.drain():
        if isinstance(record, Completed):
            buffer.placed(record.group_id, Place(0, len(journal)))
            journal.append((record, Place(0, len(journal))))
        else:
            journal.append(record)
    return journal


def starts(buffer: Buffer) -> list[Began]:
    """Of a learner, among what the buffer has just decided."""
    return [record for record in buffer.drain() if isinstance(record, Began)]


# -- every schedule


def test_every_schedule_keeps_bound_and_order_trains_each_group_once_survives_crashes_and_ends() -> None:
    run_state_machine_as_test(Schedule, settings=SCHEDULES)


@pytest.mark.slow
def test_many_more_schedules() -> None:
    run_state_machine_as_test(Schedule, settings=settings(SCHEDULES, max_examples=3000))


class OneSlotTooMany(Schedule):
    """The slot formula broken by one: what the schedules must notice."""

    orders: ClassVar[tuple[str, ...]] = ("fifo",)

    @staticmethod
    def make(config: Config) -> Buffer:
        buffer = make_buffer(config)
        proved = buffer.order
        assert isinstance(proved, Fifo)

        class Wider(Fifo):
            worst_staleness = proved.worst_staleness

        buffer.order = Wider(proved.groups_per_step, proved.capacity + 1)
        buffer.adaptive = AdaptiveBound(config.replay.adaptive, buffer.order, config.replay.bound)
        return buffer


def test_one_slot_too_many_breaks_the_bound() -> None:
    with pytest.raises(AssertionError, match="older than the bound"):
        run_state_machine_as_test(OneSlotTooMany, settings=FIRST_FAILURE)


# -- staleness


def ages(buffer: Buffer, steps: int, interval: int = 1) -> list[int]:
    """A generator that is always as early as it may be; the staleness of every trained group."""
    found: list[int] = []
    version = NEW
    for step in range(steps):
        tickets = issue_all(buffer, version=version)
        complete(buffer, tickets, version)
        found += [ticket.group_id // 4 - version.step for ticket in tickets]
        assert buffer.pop(step) is not None
        if (step + 1) % interval == 0:
            version = PolicyVersion(step + 1)
            buffer.acknowledge(version)
    return found


def test_staleness_zero_is_exactly_synchronous() -> None:
    assert set(ages(buffer_of(max_staleness=0), 9)) == {0}
    assert set(ages(buffer_of(max_staleness=3, order="synchronous"), 9)) == {0}


def test_a_fraction_lets_that_share_of_a_step_be_one_older() -> None:
    found = ages(buffer_of(max_staleness=0.5), 9)
    assert set(found) == {0, 1}
    assert sum(found) / len(found) == pytest.approx(0.5, abs=0.1)


def test_a_publish_interval_keeps_the_same_bound() -> None:
    assert max(ages(buffer_of(max_staleness=2), 9, interval=3)) == 2


def test_a_straggler_holds_fifo_and_is_passed_by_the_window_within_its_bound() -> None:
    trained = {}
    for order, window in (("fifo", 1), ("windowed", 5)):
        buffer = buffer_of(order=order, window=window, max_staleness=3)
        straggler, *others = issue_all(buffer)
        complete(buffer, others)
        trained[order] = 0
        while buffer.pop(trained[order]) is not None:
            trained[order] += 1
            buffer.acknowledge(PolicyVersion(trained[order]))
            complete(buffer, issue_all(buffer, version=PolicyVersion(trained[order])), PolicyVersion(trained[order]))
        complete(buffer, [straggler])
        step = trained[order]
        batch = buffer.pop(step)
        assert batch is not None
        assert batch[0].group_id == 0
        assert buffer.order.worst_staleness is not None
        assert step <= buffer.order.worst_staleness == 3
    assert trained == {"fifo": 0, "windowed": 1}


def test_ready_generates_an_over_age_group_again_with_the_same_prompt_and_younger_weights() -> None:
    buffer = buffer_of(order="ready")
    straggler, *others = issue_all(buffer)
    complete(buffer, others)
    for step in range(2):
        assert 0 not in train(buffer, step)
    complete(buffer, [straggler])
    complete(buffer, issue_all(buffer, version=PolicyVersion(2)), PolicyVersion(2))
    assert buffer.pop(2) is not None
    assert buffer.phase(0) is Phase.WAITING
    assert buffer.issue("a", NEW, 0.0) is None  # it could not be trained by step 3
    again = buffer.issue("a", PolicyVersion(2), 0.0)
    assert again is not None
    assert (again.group_id, again.attempt, again.prompt_index, again.issued_version) == (0, 1, 0, PolicyVersion(2))
    assert buffer.selection_metrics()["selection/over_age"] == 1


def test_what_was_handed_back_does_not_count_against_a_prompt_whose_group_became_too_old_either() -> None:
    buffer = buffer_of(order="ready", max_attempts=2)
    for _ in range(2):
        buffer.issue("b", NEW, 0.0)
        buffer.release("b", excused=True)
    straggler, *others = issue_all(buffer)
    complete(buffer, others)
    for step in range(2):
        train(buffer, step)
    complete(buffer, [straggler])
    complete(buffer, issue_all(buffer, version=PolicyVersion(2)), PolicyVersion(2))
    assert buffer.pop(2) is not None
    assert (buffer.phase(0), buffer.exhausted()) == (Phase.WAITING, [])


def test_ready_may_pass_an_over_age_group_on() -> None:
    buffer = buffer_of(order="ready", over_age="pass")
    straggler, *others = issue_all(buffer)
    complete(buffer, others)
    for step in range(2):
        train(buffer, step)
    complete(buffer, [straggler])
    assert buffer.order.worst_staleness is None
    assert 0 in {*train(buffer, 2), *train(buffer, 3)}
    assert buffer.phase(0) is not Phase.WAITING


# -- leases


def test_a_heartbeat_extends_the_tickets_that_it_names_and_no_other() -> None:
    buffer = buffer_of(lease=10.0)
    first, second = [buffer.issue("a", NEW, 0.0) for _ in range(2)]
    assert first is not None
    buffer.extend("a", [(first.group_id, 0)], 8.0)
    buffer.extend("b", [(1, 0)], 8.0)
    assert buffer.expire(10.0) == [second]
    assert buffer.expire(17.9) == []
    assert buffer.expire(18.0) == [first]
    assert buffer.held("a") == 0


def test_the_oldest_lost_ticket_is_issued_again_first_with_the_next_attempt() -> None:
    buffer = buffer_of(max_staleness=0)
    for worker in "abab":
        buffer.issue(worker, NEW, 0.0)
    buffer.release("b")
    buffer.release("a")
    again = [buffer.issue("c", NEW, 0.0) for _ in range(5)]
    assert [ticket and (ticket.group_id, ticket.attempt) for ticket in again] == [(0, 1), (1, 1), (2, 1), (3, 1), None]


def test_a_late_answer_is_refused_and_counted_and_a_repeated_one_is_known() -> None:
    buffer = buffer_of()
    ticket = buffer.issue("a", NEW, 0.0)
    assert ticket is not None
    buffer.release("a")
    with pytest.raises(GroupRefused, match="attempt 0 is lost"):
        buffer.complete("a", answer(ticket, NEW), (), 1)
    again = buffer.issue("b", NEW, 0.0)
    assert again is not None
    complete(buffer, [again], worker="b")
    with pytest.raises(DuplicateGroup):
        buffer.complete("b", answer(again, NEW), (), 1)
    with pytest.raises(GroupRefused, match="attempt 1 is completed"):
        buffer.complete("a", answer(ticket, NEW), (), 1)
    assert buffer.selection_metrics()["selection/late_duplicates"] == 2


def test_an_answer_with_older_tokens_or_another_prompt_is_refused_and_the_ticket_issued_again() -> None:
    buffer = buffer_of(max_staleness=0)
    train(buffer, 0)
    ticket = buffer.issue("a", PolicyVersion(1), 0.0)
    assert ticket is not None
    with pytest.raises(GroupRefused, match=r"tokens of version 0\.0, at least step 1 is required"):
        buffer.complete("a", answer(ticket, NEW), (), 1)
    again = buffer.issue("b", PolicyVersion(1), 5.0)
    assert again == replace(ticket, attempt=1, deadline=35.0)
    with pytest.raises(GroupRefused, match="it answers copy prompt 99, not copy prompt 4"):
        buffer.complete("b", replace(answer(again, PolicyVersion(1)), prompt_index=99), (), 1)


def test_a_group_that_is_lost_too_often_ends_as_placeholders() -> None:
    buffer = buffer_of(max_attempts=2, lease=10.0)
    for now in (0.0, 10.0):
        buffer.issue("a", NEW, now)
        buffer.expire(now + 10.0)
    (ticket,) = buffer.exhausted()
    assert (ticket.group_id, ticket.attempt) == (0, 2)  # one of its own: those before it were lost, or dropped
    assert buffer.complete_placeholder(placeholder(ticket), (), 1) is not None
    assert buffer.exhausted() == []
    assert buffer.selection_metrics()["selection/placeholders"] == 1
    assert 0 in train(buffer, 0)


def test_a_ticket_that_a_worker_hands_back_on_its_way_out_does_not_count_against_its_prompt() -> None:
    buffer = buffer_of(max_attempts=2)
    for attempt in range(5):
        ticket = buffer.issue("a", NEW, 0.0)
        assert ticket is not None
        assert (ticket.group_id, ticket.attempt) == (0, attempt)
        buffer.release("a", excused=True)
    for _ in range(2):
        assert buffer.exhausted() == []
        buffer.issue("a", NEW, 0.0)
        buffer.release("a")
    assert [ticket.group_id for ticket in buffer.exhausted()] == [0]


def test_what_was_handed_back_does_not_count_after_a_restart_of_the_service_either() -> None:
    """But for the last ticket, of whose end the journal says nothing."""
    buffer = buffer_of(max_attempts=2)
    for _ in range(3):
        buffer.issue("a", NEW, 0.0)
        buffer.release("a", excused=True)
    again = make_buffer(Config.model_validate({"replay": {"groups_per_step": 4, "max_attempts": 2, "lease": 10.0}}))
    again.restore(None, buffer.drain())
    again.acknowledge(NEW)
    assert again.expire(0.0) == []
    assert [ticket.group_id for ticket in again.expire(11.0)] == [0]
    assert again.exhausted() == []
    again.issue("b", NEW, 11.0)
    again.release("b")
    assert [ticket.group_id for ticket in again.exhausted()] == [0]


def test_an_endless_answer_ends_as_placeholders_although_its_worker_lives() -> None:
    buffer = buffer_of(lease=10.0, group_timeout=50.0)
    ticket = buffer.issue("a", NEW, 0.0)
    for now in range(0, 60, 5):
        buffer.extend("a", [(0, 0)], float(now))
        assert buffer.expire(float(now)) == []
    assert buffer.expire(60.0) == [ticket]  # the worker had until 50 to end it by itself
    assert [exhausted.group_id for exhausted in buffer.exhausted()] == [0]


def test_the_time_of_a_prompt_adds_up_over_its_workers() -> None:
    buffer = buffer_of(lease=10.0, group_timeout=50.0)
    buffer.issue("a", NEW, 0.0)
    buffer.extend("a", [(0, 0)], 40.0)
    buffer.release("a")  # last extended at 40
    buffer.issue("b", NEW, 100.0)
    buffer.extend("b", [(0, 1)], 110.0)
    assert buffer.expire(119.0) == []
    assert [ticket.attempt for ticket in buffer.expire(120.0)] == [1]
    assert len(buffer.exhausted()) == 1


def test_a_group_whose_frames_a_crash_has_spoilt_is_generated_again_whatever_it_took_before() -> None:
    buffer = buffer_of(max_attempts=1)
    tickets = issue_all(buffer)
    complete(buffer, tickets[:1])
    journal = [record[0] if isinstance(record, tuple) else record for record in written(buffer)]
    recovered = buffer_of(max_attempts=1)
    recovered.restore(None, journal)
    assert recovered.exhausted() == []
    again = recovered.issue("a", NEW, 0.0)
    assert again is not None
    assert (again.group_id, again.attempt) == (0, 1)
    third = buffer_of(max_attempts=1)
    third.restore(None, [*journal, *recovered.drain()])
    assert third._lives[0].issues == recovered._lives[0].issues == 1


def test_time_without_any_worker_does_not_count_against_a_prompt() -> None:
    buffer = buffer_of(lease=10.0, group_timeout=50.0)
    buffer.issue("a", NEW, 0.0)
    buffer.expire(10.0)
    assert buffer.issue("b", NEW, 10_000.0) is not None
    assert buffer.exhausted() == []


# -- crashes and restarts


def test_a_worker_keeps_its_tickets_over_a_crash_of_the_service() -> None:
    buffer = buffer_of(lease=10.0)
    kept, *_ = [buffer.issue("a", NEW, 0.0) for _ in range(2)]
    assert kept is not None
    recovered = buffer_of(lease=10.0)
    recovered.restore(None, written(buffer))
    recovered.begin(NEW)
    assert recovered.expire(1000.0) == []  # the clock is another one: their leases begin now
    recovered.adopt("a", [(0, 0)], 1005.0)
    assert [ticket.group_id for ticket in recovered.expire(1010.0)] == [1]
    assert recovered.held("a") == 1
    complete(recovered, [kept])


def test_a_snapshot_is_the_whole_state_and_survives_its_encoding() -> None:
    buffer = buffer_of(filter={"signal": True})
    train(buffer, 0)
    ticket = buffer.issue("a", PolicyVersion(1), 0.0)
    assert ticket is not None
    assert buffer.complete("a", answer(ticket, PolicyVersion(1), (1.0, 1.0)), (), 1) is None
    written(buffer)
    snapshot = buffer.snapshot()
    again = buffer_of()
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=Snapshot))
    assert again.snapshot() == snapshot


def test_a_restarted_learner_gets_the_same_batches_again_while_servers_keep_their_version() -> None:
    buffer = buffer_of()
    batches = []
    for step in range(3):
        batches.append(train(buffer, step))
        written(buffer)
    buffer.begin(PolicyVersion(1, incarnation=1), Ledger(below=4, cursors={"copy": 4}))
    assert buffer.acknowledged == PolicyVersion(3)
    assert buffer.issue("a", PolicyVersion(3), 0.0) is not None
    for step in (1, 2):
        batch = buffer.pop(step)
        assert batch is not None
        assert [stored.group_id for stored in batch] == batches[step]
        assert all(stored.place is not None for stored in batch)
    assert buffer.ledger().below == 12


def test_the_ledger_of_a_step_that_is_delivered_again_holds_no_later_group() -> None:
    buffer = buffer_of()
    for step in range(3):
        train(buffer, step)
        written(buffer)
    buffer.begin(PolicyVersion(1, incarnation=1))
    assert buffer.pop(1) is not None
    ledger = buffer.ledger()
    assert (ledger.below, ledger.above) == (8, ())
    assert list(ledger.pending) == list(range(8, ledger.cursors["copy"]))


def test_frames_that_cannot_be_read_are_generated_again_with_their_prompts() -> None:
    buffer = buffer_of()
    for step in range(3):
        train(buffer, step)
        written(buffer)
    buffer.begin(PolicyVersion(1, incarnation=1))
    buffer.lose(1, [5])
    assert buffer.next_step == 1
    assert buffer.pop(1) is None
    ticket = buffer.issue("a", PolicyVersion(3), 0.0)
    assert ticket is not None
    assert (ticket.group_id, ticket.attempt, ticket.prompt_index) == (5, 1, 5)
    complete(buffer, [ticket], PolicyVersion(3))
    assert [stored.group_id for stored in buffer.pop(1) or ()] == [4, 5, 6, 7]
    assert [stored.group_id for stored in buffer.pop(2) or ()] == [8, 9, 10, 11]


def test_a_completed_group_without_readable_frames_is_generated_again_after_a_crash() -> None:
    buffer = buffer_of()
    complete(buffer, issue_all(buffer))
    journal = [
        record[0] if isinstance(record, tuple) and record[1].offset == 10 else record for record in written(buffer)
    ]
    damaged = next(record for record in journal if isinstance(record, Completed)).group_id
    recovered = buffer_of()
    recovered.restore(None, journal)
    recovered.begin(NEW)
    (ticket,) = issue_all(recovered)
    assert (ticket.group_id, ticket.attempt, ticket.prompt_index) == (damaged, 1, damaged)


def test_a_fresh_buffer_goes_on_where_the_ledger_of_a_checkpoint_ends() -> None:
    buffer = make_buffer(Config.model_validate({"replay": {"groups_per_step": 2, "order": "windowed", "window": 2}}))
    ledger = Ledger(below=1, above=(2,), pending={1: ("copy", 4), 3: ("copy", 3)}, cursors={"copy": 5})
    buffer.begin(PolicyVersion(1, incarnation=1), ledger)
    buffer.acknowledge(PolicyVersion(1, incarnation=1))
    tickets = issue_all(buffer, version=PolicyVersion(1))
    assert [(ticket.group_id, ticket.prompt_index) for ticket in tickets[:4]] == [(1, 4), (3, 3), (4, 5), (5, 6)]
    complete(buffer, tickets, PolicyVersion(1))
    assert [stored.group_id for stored in buffer.pop(1) or ()] == [1, 3]


def test_what_the_learner_has_trained_beyond_a_torn_journal_is_settled() -> None:
    buffer = buffer_of()
    train(buffer, 0)
    journal = written(buffer)
    train(buffer, 1)
    recovered = buffer_of()
    recovered.restore(None, journal)
    recovered.begin(PolicyVersion(2), buffer.ledger())
    assert starts(recovered)[-1].unknown == (0,), "of step 0 a record may be lost, too"
    assert (recovered.next_step, recovered.groups) == (2, 0)
    recovered.acknowledge(PolicyVersion(2))
    assert [ticket.group_id for ticket in issue_all(recovered, version=PolicyVersion(2))][:2] == [8, 9]


def test_a_learner_whose_groups_are_others_than_the_journal_says_is_believed() -> None:
    """Step 0 was taken back, put together again and trained; then the journal lost all of that."""
    buffer = buffer_of(order="ready", over_age="pass")
    assert train(buffer, 0) == [0, 1, 2, 3]
    journal = written(buffer)
    buffer.begin(PolicyVersion(0, incarnation=1))
    buffer.lose(0, [2])
    assert [stored.group_id for stored in buffer.pop(0) or ()] == [0, 1, 3, 4]
    recovered = buffer_of(order="ready", over_age="pass")
    recovered.restore(None, journal)
    recovered.begin(PolicyVersion(1, incarnation=1), buffer.ledger())
    assert starts(recovered)[-1].unknown == (0,)
    tickets = issue_all(recovered, version=PolicyVersion(1))
    assert [ticket.group_id for ticket in tickets][:4] == [2, 5, 6, 7]
    assert [ticket.prompt_index for ticket in tickets][:4] == [2, 5, 6, 7]


def test_a_learner_whose_groups_are_those_of_the_journal_leaves_its_steps_as_they_are() -> None:
    buffer = buffer_of(order="ready", over_age="pass")
    ledgers = [buffer.ledger()]
    for step in range(2):
        train(buffer, step)
        ledgers.append(buffer.ledger())
    journal = written(buffer)
    for step, ledger in enumerate(ledgers):
        recovered = buffer_of(order="ready", over_age="pass")
        recovered.restore(None, journal)
        recovered.begin(PolicyVersion(step, incarnation=1), ledger)
        assert starts(recovered)[-1].unknown == ()
        assert recovered.next_step == 2


def test_steps_before_the_oldest_checkpoint_are_forgotten_with_their_segments() -> None:
    buffer = buffer_of()
    for step in range(3):
        train(buffer, step)
        for record in buffer.drain():
            if isinstance(record, Completed):
                buffer.placed(record.group_id, Place(step, 0))
    assert buffer.oldest_place() == 0
    buffer.saved(oldest=2)
    assert buffer.oldest_place() == 1  # a group of step 2 was generated during step 1
    with pytest.raises(ValueError, match="step 1 was asked for, 3 is next"):
        buffer.pop(1)


def test_without_a_journal_frames_and_step_go_when_the_next_one_is_asked_for() -> None:
    buffer = buffer_of()
    train(buffer, 0)
    first = buffer.pop(0)
    assert first is not None
    assert first[0].frames == (b"header", b"arena")
    assert buffer.phase(0) is Phase.CONSUMED
    train(buffer, 1)
    assert buffer.phase(0) is None
    with pytest.raises(ValueError, match="step 0 was asked for, 2 is next"):
        buffer.pop(0)


# -- filters


def test_a_filtered_group_is_replaced_in_its_place_and_the_last_try_is_taken_as_it_is() -> None:
    buffer = buffer_of(filter={"signal": True, "tries": 3})
    first, *_ = issue_all(buffer)
    for attempt, prompt_index in ((0, 0), (1, 8), (2, 9)):
        assert (first.group_id, first.attempt, first.prompt_index) == (0, attempt, prompt_index)
        stored = buffer.complete("a", answer(first, NEW, (1.0, 1.0)), (), 1)
        assert (stored is None) == (attempt < 2)
        if stored is None:
            (first,) = issue_all(buffer)
    metrics = buffer.selection_metrics()
    assert (metrics["selection/generated/groups"], metrics["selection/dropped/groups"]) == (3, 2)
    assert metrics["selection/dropped/pass_rate"] == 1.0


def test_a_dropped_group_of_a_mix_keeps_its_task_and_every_task_its_prompts() -> None:
    mix = [{"label": "x", "weight": 3}, {"label": "y", "weight": 1}]
    config = {"task": {"mix": mix}, "replay": {"groups_per_step": 4, "max_staleness": 0, "filter": {"signal": True}}}
    buffer = make_buffer(Config.model_validate(config))
    buffer.begin(NEW)
    buffer.acknowledge(NEW)
    tickets = issue_all(buffer)
    assert sorted((ticket.task, ticket.prompt_index) for ticket in tickets) == [("x", 0), ("x", 1), ("x", 2), ("y", 0)]
    (dropped,) = [ticket for ticket in tickets if ticket.task == "y"]
    buffer.complete("a", answer(dropped, NEW, (0.0, 0.0)), (), 1)
    (again,) = issue_all(buffer)
    assert (again.group_id, again.task, again.prompt_index) == (dropped.group_id, "y", 1)


def test_the_adaptive_bound_admits_fewer_groups_and_takes_nothing_back() -> None:
    buffer = buffer_of(max_staleness=2, adaptive={"enabled": True, "patience": 1, "ess_low": 0.7})
    assert len(issue_all(buffer)) == 12
    move = buffer.progress(PolicyVersion(1), {"offpolicy/ess": 0.65})
    assert move is not None
    assert move.reason == "ess 0.65 (range 0.7..0.8) at staleness 2"
    assert buffer.selection_metrics()["staleness/admitted"] == move.staleness == 1.0
    buffer.acknowledge(PolicyVersion(1))
    assert buffer.issue("a", PolicyVersion(9), 0.0) is None  # nothing is contained yet
    complete(buffer, [slot.ticket(1, 0.0) for slot in buffer.snapshot().slots])
    assert buffer.pop(0) is not None
    assert [ticket.group_id for ticket in issue_all(buffer, version=PolicyVersion(1))] == []
    assert buffer.pop(1) is not None
    buffer.acknowledge(PolicyVersion(2))
    tickets = issue_all(buffer, version=PolicyVersion(2))
    assert [(ticket.group_id, ticket.issued_version.step) for ticket in tickets] == [(12, 2), (13, 2), (14, 2), (15, 2)]


def test_the_last_step_ends_the_tickets() -> None:
    buffer = buffer_of(steps=1, max_staleness=3)
    assert [ticket.group_id for ticket in issue_all(buffer)] == [0, 1, 2, 3]


def test_damage_takes_back_the_step_that_is_asked_for_and_nothing_else() -> None:
    """The learner's last start is long ago, and the steps up to the kept checkpoints are forgotten."""
    buffer = buffer_of(steps=30)
    for step in range(12):
        train(buffer, step)
        written(buffer)
    buffer.saved(9)
    complete(buffer, issue_all(buffer, version=PolicyVersion(12))[:6], PolicyVersion(12))
    assert [stored.group_id for stored in buffer.pop(12) or ()] == [48, 49, 50, 51]
    buffer.lose(12, [49, 51])  # two of one batch
    assert buffer.next_step == 12
    again = issue_all(buffer, version=PolicyVersion(12))
    assert [(each.group_id, each.attempt, each.prompt_index) for each in again[:2]] == [(49, 1, 49), (51, 1, 51)]
    complete(buffer, again[:2], PolicyVersion(12))
    assert [stored.group_id for stored in buffer.pop(12) or ()] == [48, 49, 50, 51]
    assert [buffer.phase(group_id) for group_id in (36, 52, 53)] == [Phase.CONSUMED, Phase.COMPLETED, Phase.COMPLETED]
    assert buffer.charged <= buffer.order.capacity


def test_damage_is_recovered_as_it_happened() -> None:
    buffer = buffer_of(steps=30)
    journal = []
    for step in range(3):
        train(buffer, step)
        journal += written(buffer)
    buffer.begin(PolicyVersion(1, incarnation=1))
    buffer.lose(1, [4, 6])
    recovered = buffer_of(steps=30)
    recovered.restore(None, journal + written(buffer))
    assert recovered.next_step == buffer.next_step == 1
    assert [recovered.phase(group_id) for group_id in range(4, 9)] == [buffer.phase(i) for i in range(4, 9)]


def test_no_prompt_is_trained_twice_where_ids_agree_and_prompts_do_not() -> None:
    """The journal lost that a filter had replaced prompt 0 by another; the weights contain the other."""
    buffer = buffer_of(filter={"signal": True}, steps=30)
    tickets = issue_all(buffer)
    journal = written(buffer)
    assert buffer.complete("a", answer(tickets[0], NEW, rewards=(1.0, 1.0)), (b"header", b"arena"), 11) is None
    (replaced,) = issue_all(buffer)
    assert (replaced.group_id, replaced.prompt_index) == (0, 8)
    complete(buffer, [replaced, *tickets[1:4]])
    assert [stored.group_id for stored in buffer.pop(0) or ()] == [0, 1, 2, 3]

    recovered = buffer_of(filter={"signal": True}, steps=30)
    recovered.restore(None, journal)
    complete(recovered, tickets[:4])  # prompt 0 as group 0
    assert [stored.group_id for stored in recovered.pop(0) or ()] == [0, 1, 2, 3]
    recovered.begin(PolicyVersion(1, incarnation=2), buffer.ledger())
    recovered.acknowledge(PolicyVersion(1, incarnation=2))
    asked = [ticket.prompt_index for ticket in issue_all(recovered, version=PolicyVersion(1))]
    assert not {8, 1, 2, 3} & set(asked)
    assert len(asked) == len(set(asked)) == 8


def test_a_quarantined_group_stays_so_through_a_crash_and_a_restore() -> None:
    buffer = buffer_of(steps=30)
    train(buffer, 0)
    journal = written(buffer)
    assert buffer.quarantine(0, 2, 0, "it fails")
    assert not buffer.quarantine(0, 2, 0, "it fails"), "known already"
    assert not buffer.quarantine(1, 3, 0, "it fails"), "of another step"
    assert not buffer.quarantine(0, 99, 0, "it fails"), "no such group"
    train(buffer, 1)
    assert buffer.ledger().quarantined == {2: 0}
    recovered = buffer_of(steps=30)
    recovered.restore(None, journal + written(buffer))
    recovered.begin(PolicyVersion(0, incarnation=1))
    assert [stored.quarantined for stored in recovered.pop(0) or ()] == [False, False, True, False]
    assert recovered.ledger().quarantined == {2: 0}


def test_the_ledger_tells_of_a_quarantine_that_a_torn_journal_has_lost() -> None:
    buffer = buffer_of(steps=30)
    train(buffer, 0)
    journal = written(buffer)
    buffer.quarantine(0, 2, 0, "it fails")
    recovered = buffer_of(steps=30)
    recovered.restore(None, journal)
    recovered.begin(PolicyVersion(1, incarnation=1), buffer.ledger())
    assert recovered.ledger().quarantined == {2: 0}


def test_a_group_whose_frames_were_lost_twice_is_issued_again() -> None:
    """The first recovery made it wait, which no record says; the snapshot behind it cannot be read by the next one."""
    first = buffer_of()
    journal = written(first)
    ticket = first.issue("a", NEW, 0.0)
    assert ticket is not None
    complete(first, [ticket])
    lost = [record[0] if isinstance(record, tuple) else record for record in (*journal, *written(first))]
    second = buffer_of()
    second.restore(None, lost)
    again = second.issue("a", NEW, 0.0)
    assert again is not None
    assert (again.group_id, again.attempt) == (0, 1)
    third = buffer_of()
    third.restore(None, [*lost, *second.drain()])
    assert third.phase(0) == second.phase(0)

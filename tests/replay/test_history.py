"""What the journal says has happened: states of the groups, and the batches of the surviving history."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from replay_schedule import answer
from service_parts import make_config

from streamrl.config.replay import JournalConfig
from streamrl.observe.events import Events
from streamrl.recorded.journal import RunJournal
from streamrl.replay import segments as replay_segments
from streamrl.replay.durable import DurableBuffer
from streamrl.replay.history import Contents, read_journal, recorded_batches
from streamrl.replay.journal import Journal, JournalDamaged
from streamrl.replay.life import Phase
from streamrl.replay.records import AnyRecord, Began, Completed, Consumed, Dropped, Issued, Saved, Snapshot
from streamrl.replay.segments import Entry, segment_path, segments
from streamrl.stream.codec import encode_group
from streamrl.types import Group, Ledger, PolicyVersion, Ticket

MakeGroup = Callable[..., Group]
CONFIG = JournalConfig.model_validate({})


def write(folder: Path, *entries: AnyRecord | Group) -> None:
    """One service's life: records, and groups that are completed. The first of all begins at step 0."""
    journal = Journal(folder, CONFIG, b"")
    if len(segments(folder)) == 1 and not isinstance(entries[0], Began):
        journal.append(began(0, next_step=0))
    for entry in entries:
        if isinstance(entry, Group):
            frames = [bytes(frame) for frame in encode_group(entry, 1 << 20)]
            journal.append_group(completed(entry.group_id, entry.attempt), frames)
        else:
            journal.append(entry)
    journal.commit()
    journal.close()


def completed(group_id: int, attempt: int = 0) -> Completed:
    return Completed(group_id=group_id, attempt=attempt, size=1, tokens=1)


def consumed(step: int, *group_ids: int) -> Consumed:
    return Consumed(step=step, group_ids=group_ids)


def began(step: int, next_step: int, ledger: Ledger | None = None, **what: tuple[int, ...]) -> Began:
    return Began(version=PolicyVersion(step, incarnation=1), ledger=ledger, next_step=next_step, **what)


def issued(group_id: int, attempt: int = 0) -> Issued:
    ticket = Ticket(
        group_id=group_id,
        attempt=attempt,
        task="copy",
        prompt_index=group_id,
        seed=1,
        issued_version=PolicyVersion(0),
        deadline=0.0,
    )
    return Issued(ticket=ticket)


def dropped(group_id: int, attempt: int) -> Dropped:
    return Dropped(group_id=group_id, attempt=attempt, reason="no signal", prompt_index=9)


def steps_and_ids(folder: Path) -> list[tuple[int, list[int]]]:
    return [(batch.step, [group.group_id for group in batch.groups]) for batch in recorded_batches(folder)]


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def states(*records: AnyRecord) -> dict[int, str]:
    return contents(records).state


def contents(records: Sequence[AnyRecord]) -> Contents:
    contents = Contents()
    for record in records:
        contents.add(record)
    return contents


def test_batches_are_decoded_in_the_order_of_their_steps(tmp_path: Path, make_group: MakeGroup) -> None:
    write(tmp_path, *(make_group(group_id) for group_id in (3, 0, 2, 1)), consumed(0, 1, 0), consumed(1, 2, 3))
    assert steps_and_ids(tmp_path) == [(0, [1, 0]), (1, [2, 3])]
    first = next(recorded_batches(tmp_path)).groups[0].samples[0]
    assert first.logprobs.tobytes() == make_group(1).samples[0].logprobs.tobytes()


def test_a_step_that_is_delivered_again_stays_as_it_was(tmp_path: Path, make_group: MakeGroup) -> None:
    write(tmp_path, *map(make_group, range(3)), *(consumed(step, step) for step in range(3)))
    write(tmp_path, began(1, next_step=3))
    assert steps_and_ids(tmp_path) == [(0, [0]), (1, [1]), (2, [2])]


def test_steps_that_a_learners_start_takes_back_are_consumed_again(tmp_path: Path, make_group: MakeGroup) -> None:
    write(tmp_path, *map(make_group, range(3)), *(consumed(step, step) for step in range(3)))
    write(tmp_path, began(1, next_step=1, lost=(1,)))
    assert steps_and_ids(tmp_path) == [(0, [0])]
    again = make_group(1, attempt=1, version=PolicyVersion(1, incarnation=1))
    write(tmp_path, again, consumed(1, 1))
    assert steps_and_ids(tmp_path) == [(0, [0]), (1, [1])]
    assert list(recorded_batches(tmp_path))[1].groups[0].attempt == 1


def test_a_step_that_is_consumed_again_replaces_all_later_ones(tmp_path: Path, make_group: MakeGroup) -> None:
    write(tmp_path, *map(make_group, range(4)), *(consumed(step, step) for step in range(3)), consumed(1, 3))
    assert steps_and_ids(tmp_path) == [(0, [0]), (1, [3])]


def test_the_history_of_a_compacted_journal_begins_with_the_first_whole_step(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    write(tmp_path, make_group(0), make_group(1), consumed(0, 0))
    write(tmp_path, make_group(2), consumed(1, 1), consumed(2, 2), make_group(3), consumed(3, 3))
    segment_path(tmp_path, 0).unlink()
    assert steps_and_ids(tmp_path) == [(2, [2]), (3, [3])]


def test_a_step_without_its_groups_is_told(tmp_path: Path, make_group: MakeGroup) -> None:
    write(tmp_path, make_group(0), consumed(0, 0, 1))
    with pytest.raises(JournalDamaged, match=r"step 0 without its groups \[1\]"):
        steps_and_ids(tmp_path)


def test_a_step_that_was_lost_with_the_journals_tail_is_told(tmp_path: Path, make_group: MakeGroup) -> None:
    write(tmp_path, make_group(0), consumed(0, 0))
    write(tmp_path, began(2, next_step=2, ledger=Ledger(below=2)), make_group(2), consumed(2, 2))
    batches = recorded_batches(tmp_path)
    assert next(batches).step == 0
    with pytest.raises(JournalDamaged, match="the record of step 1 is missing, step 2 is the next"):
        next(batches)


def test_a_step_whose_last_record_was_lost_is_none_of_its_former_one(tmp_path: Path, make_group: MakeGroup) -> None:
    """It was put together again, trained, and torn off: a learner's weights have other groups than are recorded."""
    write(tmp_path, *(make_group(group_id) for group_id in (0, 1, 2)), consumed(0, 0), consumed(1, 2))
    ledger = Ledger(below=2, pending={2: ("copy", 2)})
    write(tmp_path, began(2, next_step=2, ledger=ledger, unknown=(1,)), make_group(2), consumed(2, 2))
    batches = recorded_batches(tmp_path)
    assert next(batches).step == 0
    with pytest.raises(JournalDamaged, match="the record of what step 1 trained is missing"):
        next(batches)


def test_a_step_of_which_not_all_is_known_is_consumed_again_by_a_learner_that_goes_back(
    tmp_path: Path, make_group: MakeGroup
) -> None:
    write(tmp_path, *(make_group(group_id) for group_id in (0, 1, 2)), consumed(0, 0), consumed(1, 2))
    write(tmp_path, began(2, next_step=2, ledger=Ledger(below=2), unknown=(1,)), began(1, next_step=1), consumed(1, 1))
    assert steps_and_ids(tmp_path) == [(0, [0]), (1, [1])]


def test_groups_of_a_step_that_is_not_known_are_settled_or_wait() -> None:
    records = (completed(0), completed(1), completed(2), consumed(0, 2, 1))
    start = began(1, next_step=1, ledger=Ledger(below=2, pending={2: ("copy", 2)}), unknown=(0,))
    assert states(*records, start) == {0: "committed", 1: "committed", 2: "waiting"}
    assert contents((*records, start)).uses() == {}


def test_a_step_whose_record_is_damaged_is_told(
    tmp_path: Path, make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, make_group(0), consumed(0, 0))
    write(tmp_path, make_group(1), consumed(1, 1))
    flip_last_byte(segment_path(tmp_path, 0))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(JournalDamaged, match="the record of step 0 is missing, step 1 is the next"),
    ):
        steps_and_ids(tmp_path)
    assert "segment 000000: torn tail" in caplog.text


def test_a_run_that_began_at_a_later_step_has_its_history_from_there(tmp_path: Path, make_group: MakeGroup) -> None:
    write(tmp_path, began(5, next_step=5, ledger=Ledger(below=5)), make_group(5), consumed(5, 5))
    assert steps_and_ids(tmp_path) == [(5, [5])]


def test_the_states_of_a_group_follow_its_records() -> None:
    life = (issued(0), completed(0), consumed(0, 0), Saved(oldest=0), Saved(oldest=1))
    assert [states(*life[:end])[0] for end in range(1, 6)] == [
        "issued",
        "completed",
        "consumed",
        "consumed",
        "committed",
    ]


def test_a_dropped_group_waits_for_its_places_next_ticket() -> None:
    records = (issued(0), dropped(0, attempt=0))
    assert states(*records) == {0: "waiting"}
    assert contents(records).dropped == {(0, 0): "no signal"}
    assert states(*records, issued(0, attempt=1)) == {0: "issued"}


def test_a_start_that_takes_steps_back_leaves_their_groups_complete_and_the_lost_ones_waiting() -> None:
    trained = (completed(0), completed(1), consumed(0, 0, 1))
    assert states(*trained, began(0, next_step=0, lost=(1,))) == {0: "completed", 1: "waiting"}


def test_a_ledger_knows_groups_to_be_committed_whose_step_was_lost() -> None:
    ledger = Ledger(below=1, above=(2,))
    assert states(completed(0), completed(1), completed(2), began(1, next_step=1, ledger=ledger)) == {
        0: "committed",
        1: "completed",
        2: "committed",
    }


class Served:
    """The durable side of a service whose checkpoints let it forget."""

    def __init__(self, folder: Path, incarnation: int = 0, **replay: Any) -> None:
        config = make_config(replay=replay, run={"steps": 30}, journal={"keep": "resume"})
        self.durable = DurableBuffer(config, folder, Events(), lambda: 0.0)
        self.buffer = self.durable.buffer
        self.durable.begin(PolicyVersion(0, incarnation), None)
        self.buffer.acknowledge(PolicyVersion(0, incarnation))
        self.incarnation = incarnation
        self.out: dict[int, Ticket] = {}

    def issue(self, version: int) -> None:
        while ticket := self.buffer.issue("a", PolicyVersion(version, self.incarnation), 0.0):
            self.out[ticket.group_id] = ticket

    def complete(self, *ids: int, version: int | None = None) -> None:
        for group_id in ids:
            at = self.buffer.acknowledged if version is None else PolicyVersion(version)
            group = answer(self.out.pop(group_id), at)
            self.durable.complete("a", group, [bytes(frame) for frame in encode_group(group, 1 << 20)])
        self.durable.commit(0.0)

    def train(self, step: int) -> None:
        assert self.buffer.pop(step) is not None
        self.durable.append()
        self.durable.commit(0.0)
        self.buffer.acknowledge(PolicyVersion(step + 1))
        self.issue(step + 1)

    def roll(self) -> None:
        self.durable._journal.roll(self.durable._snapshot())


def test_a_compacted_journal_begins_behind_the_last_step_whose_groups_were_deleted(tmp_path: Path) -> None:
    """A quick group came before those of the step before its own, and lies in a segment that is gone."""
    served = Served(tmp_path, groups_per_step=2, max_staleness=2, release="eager")
    served.issue(0)
    served.complete(0, 1)
    served.train(0)
    served.complete(4)  # of step 2
    served.roll()
    served.complete(2, 3)
    served.train(1)
    served.complete(5)
    served.train(2)
    served.complete(6, 7)
    served.train(3)
    served.roll()
    served.complete(8, 9)
    served.train(4)
    served.durable.saved(4, 0.0)
    served.durable.close()
    folder = tmp_path / "journal"
    assert segments(folder)[0][0] > 0
    assert [batch.step for batch in recorded_batches(folder)] == [3, 4]


def test_groups_that_end_as_placeholders_are_those_of_their_step_also_after_a_drop(tmp_path: Path) -> None:
    served = Served(tmp_path, order="ready", max_attempts=1, max_staleness=1)
    served.issue(0)
    served.complete(0, 1)
    served.train(0)
    served.complete(*[group_id for group_id in served.out if group_id > 3][:2])
    served.train(1)
    served.complete(2, version=0)  # too old by now
    served.complete(max(served.out))
    assert served.buffer.pop(2) is None
    served.durable.append()
    (given_up,) = served.buffer.exhausted()
    served.durable.give_up(given_up)
    served.train(2)
    served.durable.close()
    (kept,) = [group for group in RunJournal(tmp_path).groups if group.group_id == 2 and group.attempt == 1]
    assert kept.steps == (2,)


def test_a_journal_is_read_while_the_run_forgets_its_beginning(tmp_path: Path) -> None:
    snapshot = msgspec.msgpack.encode(Snapshot())
    journal = Journal(tmp_path / "journal", CONFIG, snapshot)
    for group_id in range(4):
        journal.append_group(completed(group_id), (b"h", bytes(1000)))
        journal.commit()
        journal.roll(snapshot)
    forgotten: list[object] = []

    def report(at: float, total: float) -> None:
        if not forgotten:
            forgotten.append(journal.compact(None))

    read = RunJournal(tmp_path, verify=True, report=report)
    assert [group.group_id for group in read.groups][-1] == 3
    entries = read_journal(tmp_path / "journal")
    next(entries)
    journal.close()
    for _, path in segments(tmp_path / "journal")[1:]:
        path.unlink()
    assert list(entries) is not None


def test_a_group_whose_bytes_the_disk_cannot_give_is_waited_for_again(tmp_path: Path, monkeypatch) -> None:
    served = Served(tmp_path)
    served.issue(0)
    served.complete(0, 1)
    served.durable.close()
    read = replay_segments._read_frames

    def unreadable(file: Any, entry: Entry, path: Path) -> Any:
        if isinstance(entry.record, Completed) and entry.record.group_id == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(file, entry, path)

    monkeypatch.setattr(replay_segments, "_read_frames", unreadable)
    again = Served(tmp_path, incarnation=1)
    assert (again.buffer.phase(0), again.buffer.phase(1)) == (Phase.COMPLETED, Phase.ISSUED)
    again.durable.close()

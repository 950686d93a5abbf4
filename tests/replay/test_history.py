"""What the journal says has happened: states of the groups, and the batches of the surviving history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from streamrl.config.replay import JournalConfig
from streamrl.replay.history import Contents, recorded_batches
from streamrl.replay.journal import Journal, JournalDamaged
from streamrl.replay.records import AnyRecord, Began, Completed, Consumed, Dropped, Issued, Saved
from streamrl.replay.segments import segment_path, segments
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


def began(step: int, next_step: int, ledger: Ledger | None = None, lost: tuple[int, ...] = ()) -> Began:
    return Began(version=PolicyVersion(step, incarnation=1), ledger=ledger, next_step=next_step, lost=lost)


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

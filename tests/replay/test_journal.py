"""The journal: what was written comes back, what was torn is cut, what was damaged is told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.replay.journal import (
    BatchRecord,
    GroupRecord,
    Journal,
    JournalDamaged,
    read_journal,
    recorded_batches,
)
from streamrl.stream.codec import encode_group
from streamrl.types import Group, PolicyVersion

MakeGroup = Callable[..., Group]


def write(folder: Path, groups: list[Group], steps: dict[int, list[int]]) -> Path:
    """One service's life: all groups, then its batches."""
    journal = Journal(folder)
    for group in groups:
        journal.append_group(encode_group(group, 1 << 20))
    for step, group_ids in steps.items():
        journal.append_batch(step, group_ids)
    journal.close()
    return journal.path


def steps_and_ids(folder: Path) -> list[tuple[int, list[int]]]:
    return [(batch.step, [group.group_id for group in batch.groups]) for batch in recorded_batches(folder)]


def test_frames_come_back_as_they_were_received(tmp_path: Path, make_group: MakeGroup) -> None:
    groups = [make_group(group_id, tokens=50) for group_id in (1, 0)]
    write(tmp_path, groups, {0: [0, 1]})
    records = list(read_journal(tmp_path))
    assert records[:2] == [
        GroupRecord(header, bytes(arena)) for header, arena in (encode_group(g, 1 << 20) for g in groups)
    ]
    assert records[2] == BatchRecord(0, (0, 1))


def test_batches_are_decoded_in_the_order_of_their_steps(tmp_path: Path, make_group: MakeGroup) -> None:
    groups = [make_group(group_id) for group_id in (3, 0, 2, 1)]
    write(tmp_path, groups, {0: [0, 1], 1: [2, 3]})
    assert steps_and_ids(tmp_path) == [(0, [0, 1]), (1, [2, 3])]
    first = next(recorded_batches(tmp_path)).groups[1].samples[0]
    assert first.logprobs.tobytes() == make_group(1).samples[0].logprobs.tobytes()


def test_a_resumed_run_replaces_its_steps_and_all_that_followed_them(tmp_path: Path, make_group: MakeGroup) -> None:
    write(tmp_path, [make_group(i) for i in range(4)], {step: [step] for step in range(4)})
    again = PolicyVersion(2, incarnation=1)
    write(tmp_path, [make_group(2, version=again)], {2: [2]})
    assert steps_and_ids(tmp_path) == [(0, [0]), (1, [1]), (2, [2])]
    versions = [batch.groups[0].samples[0].oldest for batch in recorded_batches(tmp_path)]
    assert versions == [PolicyVersion(0), PolicyVersion(0), again]


def test_a_torn_tail_is_cut_and_told_wherever_it_was_torn(
    tmp_path: Path, make_group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, [make_group(0)], {0: [0]})
    whole = path.stat().st_size
    path.unlink()
    path = write(tmp_path, [make_group(0)], {0: [0], 1: [0]})
    content = path.read_bytes()
    for size in range(whole + 1, len(content)):
        path.write_bytes(content[:size])
        with caplog.at_level(logging.WARNING):
            assert steps_and_ids(tmp_path) == [(0, [0])]
        assert f"torn tail of {size - whole} bytes at byte {whole} is left out" in caplog.text
    path.write_bytes(content[:-1] + b"\xff")  # the length is there, the content is not
    assert steps_and_ids(tmp_path) == [(0, [0])]


def test_a_life_that_ended_before_its_first_record_is_no_damage(tmp_path: Path, make_group: MakeGroup) -> None:
    write(tmp_path, [], {}).write_bytes(b"strea")
    write(tmp_path, [make_group(0)], {0: [0]})
    assert steps_and_ids(tmp_path) == [(0, [0])]


def test_a_record_that_was_changed_in_the_middle_is_told_with_its_place(tmp_path: Path, make_group: MakeGroup) -> None:
    path = write(tmp_path, [make_group(0), make_group(1)], {0: [0, 1]})
    content = bytearray(path.read_bytes())
    content[200] ^= 1
    path.write_bytes(content)
    with pytest.raises(JournalDamaged, match="record at byte 19 does not match its checksum"):
        list(read_journal(tmp_path))


def test_a_step_without_its_groups_is_told(tmp_path: Path, make_group: MakeGroup) -> None:
    write(tmp_path, [make_group(0)], {0: [0, 1]})
    with pytest.raises(JournalDamaged, match=r"step 0 without its groups \[1\]"):
        list(recorded_batches(tmp_path))


def test_another_file_is_not_taken_for_a_journal(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not mine")
    assert list(read_journal(tmp_path)) == []
    (tmp_path / "000000.journal").write_text("something else entirely")
    with pytest.raises(JournalDamaged, match="does not begin as a journal"):
        list(read_journal(tmp_path))


def test_a_batch_is_on_its_way_to_disk_when_it_is_recorded(tmp_path: Path, make_group: MakeGroup) -> None:
    journal = Journal(tmp_path)
    journal.append_group(encode_group(make_group(0), 1 << 20))
    journal.append_batch(0, [0])
    assert steps_and_ids(tmp_path) == [(0, [0])]  # by another reader, while the writer still lives
    journal.close()

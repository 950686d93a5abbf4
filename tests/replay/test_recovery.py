"""Recovery: whatever a crash or a bad disk leaves, a state that was there comes up, and the rest is cut and told."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamrl.config.replay import JournalConfig
from streamrl.replay import recovery as recovery_module
from streamrl.replay import segments as replay_segments
from streamrl.replay.journal import Journal, recover
from streamrl.replay.records import AnyRecord, Completed, Consumed, Place, Saved
from streamrl.replay.recovery import SET_ASIDE, Recovery
from streamrl.replay.segments import MAGIC, Entry, JournalDamaged, Unreadable, load_frames, scan, segment_path, segments
from tests.operations_table import GOES_ON, documented

CONFIG = JournalConfig.model_validate({})
FRAMES = (b"header", b"arena" * 4)
HEAD = 32  # bytes of a record's head


def completed(group_id: int) -> Completed:
    return Completed(group_id=group_id, attempt=0, size=26, tokens=10, oldest=0)


def consumed(step: int, *group_ids: int) -> Consumed:
    return Consumed(step=step, group_ids=group_ids)


def write(folder: Path, snapshot: bytes, *records: AnyRecord) -> list[int]:
    """One service's life. Returns the sizes of its segment after the snapshot and after each record."""
    journal = Journal(folder, CONFIG, snapshot)
    sizes = [journal.size]
    for record in records:
        if isinstance(record, Completed):
            journal.append_group(record, FRAMES)
        else:
            journal.append(record)
        sizes.append(journal.size)
    journal.commit()
    journal.close()
    return sizes


def plain(recovery: Recovery) -> list[AnyRecord]:
    return [record[0] if isinstance(record, tuple) else record for record in recovery.records]


def flip(path: Path, position: int, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= bits
    path.write_bytes(content)


def test_an_empty_folder_and_one_that_is_not_there_begin_a_run(tmp_path: Path) -> None:
    assert recover(tmp_path) == recover(tmp_path / "nowhere") == Recovery()


def test_a_torn_tail_is_cut_and_told_wherever_it_was_torn(tmp_path: Path) -> None:
    records = [completed(0), consumed(0, 0), completed(1)]
    sizes = write(tmp_path, b"s", *records)
    path = segment_path(tmp_path, 0)
    content = path.read_bytes()
    for size in range(sizes[0], sizes[-1]):
        path.write_bytes(content[:size])
        whole = max(index for index, end in enumerate(sizes) if end <= size)
        recovery = recover(tmp_path)
        assert plain(recovery) == records[:whole]
        if size == sizes[whole]:
            assert recovery.repairs == []
        else:
            assert f"torn tail of {size - sizes[whole]} bytes at byte {sizes[whole]}" in recovery.repairs[0]
        assert path.stat().st_size == sizes[whole]
        assert recover(tmp_path).repairs == []


def test_whichever_byte_of_a_segment_is_flipped_what_stood_before_it_comes_back(tmp_path: Path) -> None:
    records = [completed(0), consumed(0, 0), completed(1), Saved(oldest=0)]
    sizes = write(tmp_path, b"s", *records)
    path = segment_path(tmp_path, 0)
    content = path.read_bytes()
    for position in range(len(MAGIC), sizes[-1]):
        path.write_bytes(content)
        flip(path, position)
        before = sum(end <= position for end in sizes[1:])
        recovery = recover(tmp_path)
        assert recovery.repairs
        assert plain(recovery)[:before] == records[:before]
        for record in recovery.records:
            if isinstance(record, tuple):
                assert load_frames(tmp_path, record[1]) == FRAMES
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


def test_only_what_nothing_whole_follows_is_called_a_torn_tail(tmp_path: Path) -> None:
    """Whichever bit of a head is flipped: an interrupted write is the last one."""
    sizes = write(tmp_path, b"s", completed(0), consumed(0, 0), completed(1))
    path = segment_path(tmp_path, 0)
    content = path.read_bytes()
    for number, begin in enumerate(sizes[:-1]):
        for bit in range(8 * HEAD):
            path.write_bytes(content)
            flip(path, begin + bit // 8, 1 << bit % 8)
            last = list(scan(0, path))[-1]
            assert isinstance(last, Unreadable)
            assert last.place.offset == begin
            assert number == 2 or not last.torn, (number, bit)


def test_a_group_whose_numbers_are_damaged_is_lost_alone(tmp_path: Path) -> None:
    sizes = write(tmp_path, b"s", completed(0), completed(1), consumed(0, 0))
    flip(segment_path(tmp_path, 0), sizes[1] - 1)  # the last byte of group 0's arena
    recovery = recover(tmp_path)
    assert recovery.records == [completed(0), (completed(1), Place(0, sizes[1])), consumed(0, 0)]
    assert len(recovery.repairs) == 1
    assert f"byte {sizes[0]} do not match their checksum: group 0 is generated again" in recovery.repairs[0]
    assert recover(tmp_path) == recovery  # nothing is cut, and the same is told


def test_a_last_group_whose_numbers_never_reached_the_disk_is_cut(tmp_path: Path) -> None:
    sizes = write(tmp_path, b"s", completed(0), completed(1))
    flip(segment_path(tmp_path, 0), sizes[2] - 1)
    assert plain(recover(tmp_path)) == [completed(0)]
    assert segment_path(tmp_path, 0).stat().st_size == sizes[1]


def test_groups_whose_numbers_are_damaged_before_a_torn_tail_are_cut_with_it(tmp_path: Path) -> None:
    sizes = write(tmp_path, b"s", completed(0), completed(1), completed(2), completed(3))
    path = segment_path(tmp_path, 0)
    flip(path, sizes[2] - 1)
    flip(path, sizes[3] - 1)
    path.write_bytes(path.read_bytes()[: sizes[3] + 5])
    recovery = recover(tmp_path)
    assert (plain(recovery), len(recovery.repairs)) == ([completed(0)], 1)
    assert path.stat().st_size == sizes[1]
    assert recover(tmp_path).repairs == []


def test_a_tail_of_zeros_that_a_power_failure_leaves_is_cut(tmp_path: Path) -> None:
    sizes = write(tmp_path, b"s", completed(0))
    with segment_path(tmp_path, 0).open("ab") as file:
        file.write(bytes(8192))
    assert plain(recover(tmp_path)) == [completed(0)]
    assert segment_path(tmp_path, 0).stat().st_size == sizes[-1]


def test_a_segment_whose_snapshot_was_torn_falls_back_on_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, b"one", completed(0))
    size = write(tmp_path, b"two")[0]
    second = segment_path(tmp_path, 1)
    content = second.read_bytes()
    for end in range(size):
        second.write_bytes(content[:end])
        recovery = recover(tmp_path)
        assert (recovery.snapshot, plain(recovery)) == (b"one", [completed(0)])
        assert recover(tmp_path) == Recovery(b"one", recovery.records)  # nothing is left to tell


def test_records_behind_a_damaged_snapshot_continue_the_segment_before(tmp_path: Path) -> None:
    write(tmp_path, b"one", completed(0))
    sizes = write(tmp_path, b"two", consumed(0, 0))
    flip(segment_path(tmp_path, 1), sizes[0] - 1)
    recovery = recover(tmp_path)
    assert (recovery.snapshot, plain(recovery)) == (b"one", [completed(0), consumed(0, 0)])
    assert "an older snapshot is taken" in recovery.repairs[0]


def test_what_continues_a_history_that_is_cut_is_set_aside(tmp_path: Path) -> None:
    first = write(tmp_path, b"one", consumed(0, 0), consumed(1, 1))
    second = write(tmp_path, b"two", consumed(2, 2))
    flip(segment_path(tmp_path, 0), first[1] + 30)  # in the record of step 1
    flip(segment_path(tmp_path, 1), second[0] - 1)  # in the second snapshot
    recovery = recover(tmp_path)
    assert (recovery.snapshot, plain(recovery)) == (b"one", [consumed(0, 0)])
    assert [number for number, _ in segments(tmp_path)] == [0]
    assert segment_path(tmp_path, 1).with_name("000001.journal" + SET_ASIDE).exists()
    assert "does not continue what could be read" in recovery.repairs[-1]


@pytest.mark.parametrize("last", ["_set_aside", "_cut"])
def test_a_recovery_that_is_killed_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    first = write(tmp_path, b"one", consumed(0, 0), consumed(1, 1))
    second = write(tmp_path, b"two", consumed(2, 2))
    flip(segment_path(tmp_path, 0), first[1] + 30)
    flip(segment_path(tmp_path, 1), second[0] - 1)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(recovery_module, last, killed)
        with pytest.raises(KeyboardInterrupt):
            recover(tmp_path)
    assert plain(recover(tmp_path)) == [consumed(0, 0)]
    assert [number for number, _ in segments(tmp_path)] == [0]


def test_what_the_disk_cannot_give_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = write(tmp_path, b"one", consumed(0, 0), consumed(1, 1))
    read, bad = replay_segments._read_entry, sizes[1]

    def unreadable(file: BinaryIO, place: Place, end: int) -> Entry | Unreadable:
        if place.offset == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, place, end)

    monkeypatch.setattr(replay_segments, "_read_entry", unreadable)
    recovery = recover(tmp_path)
    assert (recovery.snapshot, plain(recovery)) == (b"one", [consumed(0, 0)])
    (told,) = recovery.repairs
    assert f"damage of {sizes[2] - bad} bytes at byte {bad}: it cannot be read" in told
    documented("... bytes at byte ...: it cannot be read: Input/output error; it is cut", told, GOES_ON)
    assert recover(tmp_path).repairs == []
    first = segment_path(tmp_path, 0)
    kept = first.with_name(first.name + SET_ASIDE)
    assert (first.stat().st_size, kept.stat().st_size) == (bad, sizes[2])  # the disk may give it on another day
    assert kept.read_bytes().startswith(first.read_bytes())
    sizes = write(tmp_path, b"two", completed(2))
    bad = len(MAGIC)  # the openings
    assert load_frames(tmp_path, Place(segment=1, offset=sizes[0]), (2, 0)) == FRAMES
    assert recover(tmp_path).records == []
    assert segments(tmp_path) == []


def test_damage_in_a_segment_before_the_newest_snapshot_does_not_matter_for_recovery(tmp_path: Path) -> None:
    sizes = write(tmp_path, b"one", consumed(0, 0))
    write(tmp_path, b"two", consumed(1, 1))
    flip(segment_path(tmp_path, 0), sizes[0] + 5)
    assert recover(tmp_path) == Recovery(snapshot=b"two", records=[consumed(1, 1)])


def test_a_segment_that_was_copied_under_the_newest_name_is_no_base_and_is_set_aside(tmp_path: Path) -> None:
    write(tmp_path, b"one", completed(0))
    write(tmp_path, b"two", consumed(0, 0))
    shutil.copy(segment_path(tmp_path, 0), segment_path(tmp_path, 2))
    recovery = recover(tmp_path)
    assert (recovery.snapshot, plain(recovery)) == (b"two", [consumed(0, 0)])
    assert "it is segment 000000 under another name" in recovery.repairs[0]
    documented("it is segment ... under another name", recovery.repairs[0], GOES_ON)
    assert segment_path(tmp_path, 2).with_name("000002.journal" + SET_ASIDE).exists()


def test_groups_of_a_segment_in_whose_place_another_was_copied_are_damaged(tmp_path: Path) -> None:
    """The record at their place may even be of the same group, of an earlier life of the run."""
    for _ in range(3):
        sizes = write(tmp_path, b"same", completed(0))
    place = Place(segment=1, offset=sizes[0])
    assert load_frames(tmp_path, place, (0, 0)) == FRAMES
    shutil.copy(segment_path(tmp_path, 0), segment_path(tmp_path, 1))
    with pytest.raises(JournalDamaged, match=r"000001.journal: it is segment 000000 under another name"):
        load_frames(tmp_path, place, (0, 0))


def test_groups_behind_a_damaged_opening_can_still_be_read(tmp_path: Path) -> None:
    sizes = write(tmp_path, b"one", completed(0))
    flip(segment_path(tmp_path, 0), len(MAGIC) + 40)
    assert load_frames(tmp_path, Place(segment=0, offset=sizes[0]), (0, 0)) == FRAMES


def test_without_any_snapshot_the_first_segments_records_continue_an_empty_buffer(tmp_path: Path) -> None:
    sizes = write(tmp_path, b"one", consumed(0, 0))
    flip(segment_path(tmp_path, 0), sizes[0] - 1)
    recovery = recover(tmp_path)
    assert (recovery.snapshot, plain(recovery)) == (None, [consumed(0, 0)])


def test_without_any_snapshot_and_without_the_first_segment_the_buffer_begins_empty(tmp_path: Path) -> None:
    write(tmp_path, b"one")
    sizes = write(tmp_path, b"two", consumed(0, 0))
    segment_path(tmp_path, 0).unlink()
    flip(segment_path(tmp_path, 1), sizes[0] - 1)
    recovery = recover(tmp_path)
    assert (recovery.snapshot, recovery.records) == (None, [])
    assert "the buffer begins empty" in recovery.repairs[1]
    assert segments(tmp_path) == []


def test_a_file_of_another_kind_is_set_aside_and_not_lost(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not mine")
    (tmp_path / "000000.journal").write_text("something else entirely")
    assert recover(tmp_path).records == []
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / ("000000.journal" + SET_ASIDE)).read_text() == "something else entirely"


WRITER = """
import sys
from pathlib import Path
from streamrl.config.replay import JournalConfig
from streamrl.replay.journal import Journal
from streamrl.replay.records import Completed

folder, first = Path(sys.argv[1]), int(sys.argv[2])
journal = Journal(folder, JournalConfig.model_validate({}), b"%d" % first)
for group_id in range(first, 10**9):
    record = Completed(group_id=group_id, attempt=0, size=1, tokens=1)
    journal.append_group(record, (b"%d" % group_id, bytes(10_000)))
    if group_id % 5 == 0:
        journal.commit()
        print(group_id, flush=True)
"""


def test_what_a_killed_process_had_committed_is_there_wherever_it_was(tmp_path: Path) -> None:
    first = 0
    for life in range(4):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            told = [int(writer.stdout.readline()) for _ in range(20 + 7 * life)]
            writer.kill()
            told += [int(line) for line in writer.stdout.read().split()]
        recovery = recover(tmp_path)
        assert recovery.snapshot == b"%d" % first
        ids = [record.group_id for record in plain(recovery) if isinstance(record, Completed)]
        assert ids == list(range(first, first + len(ids)))
        assert first + len(ids) > told[-1]
        for record in recovery.records:
            assert isinstance(record, tuple)
            assert load_frames(tmp_path, record[1])[0] == b"%d" % record[0].group_id
        first += len(ids)


class JournalUnderCrashes(RuleBasedStateMachine):
    """Random lives of writers over one folder, against the list of everything that was ever appended.

    A snapshot is the number of records before it, so that recovery's snapshot and records together must be a
    prefix of that list, and one that has everything that was committed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.history: list[tuple[AnyRecord, Place | None, bytes]] = []
        self.committed = 0  # records
        self.oldest = 0  # lowest segment that was not compacted

    @initialize()
    def begin(self) -> None:
        self.journal = Journal(self.folder, CONFIG, b"0")
        self.committed_size = self.journal.size

    @rule(step=strategies.integers(0, 9))
    def append(self, step: int) -> None:
        record = consumed(step, *range(step))
        self.journal.append(record)
        self.history.append((record, None, b""))

    @rule(arena=strategies.binary(max_size=100))
    def append_group(self, arena: bytes) -> None:
        record = completed(len(self.history))
        self.history.append((record, self.journal.append_group(record, (b"h", arena)), arena))

    @rule()
    def commit(self) -> None:
        self.journal.commit()
        self.committed, self.committed_size = len(self.history), self.journal.size

    @rule()
    def roll(self) -> None:
        self.journal.roll(b"%d" % len(self.history))
        self.committed, self.committed_size = len(self.history), self.journal.size

    @rule(oldest=strategies.integers(0, 8) | strategies.none())
    def compact(self, oldest: int | None) -> None:
        self.journal.compact(oldest)
        self.oldest = segments(self.folder)[0][0]

    @precondition(lambda self: len(self.history) > self.committed)
    @rule(data=strategies.data(), flipped=strategies.booleans())
    def crash_in_the_middle_of_a_commit(self, data: strategies.DataObject, flipped: bool) -> None:
        self.journal.commit()
        self.journal.close()
        _, path = segments(self.folder)[-1]
        size = data.draw(strategies.integers(self.committed_size, path.stat().st_size), label="size of what is left")
        with path.open("r+b") as file:
            file.truncate(size)
        if flipped and size > self.committed_size:
            flip(path, data.draw(strategies.integers(self.committed_size, size - 1), label="flipped byte"))
        self.come_up()

    @rule()
    def crash(self) -> None:
        self.journal.close()
        self.come_up()

    def come_up(self) -> None:
        recovery = recover(self.folder)
        assert recovery.snapshot is not None
        start = int(recovery.snapshot)
        whole = plain(recovery)
        assert start + len(whole) >= self.committed
        assert whole == [record for record, _, _ in self.history[start : start + len(whole)]]
        del self.history[start + len(whole) :]
        for index, record in enumerate(recovery.records, start):
            if isinstance(record, Completed):  # its frames were flipped, which a commit would not have let happen
                assert index >= self.committed
                self.history[index] = (record, None, b"")
        again = recover(self.folder)  # the first one was killed before a snapshot followed
        assert again.records == recovery.records
        assert len(again.repairs) == sum(isinstance(record, Completed) for record in again.records)  # nothing is cut
        self.journal = Journal(self.folder, CONFIG, b"%d" % len(self.history))
        self.committed, self.committed_size = len(self.history), self.journal.size

    @invariant()
    def every_group_of_a_kept_segment_is_loaded_as_it_was_written(self) -> None:
        for _, place, arena in self.history:
            if place is not None and place.segment >= self.oldest:
                assert self.journal.load(place) == (b"h", arena)

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.folder)


TestJournalUnderCrashes = JournalUnderCrashes.TestCase
TestJournalUnderCrashes.settings = settings(max_examples=40, stateful_step_count=30)

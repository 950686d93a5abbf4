"""The journal's writer: what was committed is on disk, what was not is in memory, and a full disk loses neither."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.config.replay import JournalConfig
from streamrl.replay.journal import Journal, JournalDamaged, JournalFull, read_journal, recover
from streamrl.replay.records import Completed, Consumed, Place, Saved
from streamrl.replay.segments import segment_path, segments
from tests.limited_files import limited_files

FRAMES = (b"header", b"arena" * 20)


def settings(**keys: object) -> JournalConfig:
    return JournalConfig.model_validate({"commit_seconds": 1000.0, **keys})


def completed(group_id: int, attempt: int = 0) -> Completed:
    return Completed(group_id=group_id, attempt=attempt, size=106, tokens=10, oldest=0)


def consumed(step: int, *group_ids: int) -> Consumed:
    return Consumed(step=step, group_ids=group_ids)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path, settings(), b"snapshot 0")
    yield journal
    journal.close()


def test_records_come_back_in_order_with_their_frames(journal: Journal, tmp_path: Path) -> None:
    place = journal.append_group(completed(7), FRAMES)
    journal.append(consumed(0, 7))
    journal.commit()
    recovery = recover(tmp_path)
    assert recovery.snapshot == b"snapshot 0"
    assert recovery.records == [(completed(7), place), consumed(0, 7)]
    assert recovery.repairs == []
    assert journal.load(place) == FRAMES


def test_nothing_is_on_disk_before_the_commit_and_everything_after(journal: Journal, tmp_path: Path) -> None:
    before = segment_path(tmp_path, 0).stat().st_size
    journal.append_group(completed(0), FRAMES)
    assert segment_path(tmp_path, 0).stat().st_size == before
    assert journal.uncommitted == 1
    journal.commit()
    assert segment_path(tmp_path, 0).stat().st_size == journal.size
    assert journal.uncommitted == 0


def test_an_uncommitted_group_is_loaded_from_memory_and_from_its_place_later(journal: Journal) -> None:
    journal.append(consumed(0, 1))
    place = journal.append_group(completed(0), (b"a", memoryview(b"b")))
    assert journal.load(place) == (b"a", b"b")
    journal.commit()
    assert journal.load(place) == (b"a", b"b")


def test_frames_without_any_bytes_are_frames_too(journal: Journal, tmp_path: Path) -> None:
    place = journal.append_group(completed(0), (b"", b""))
    journal.commit()
    assert journal.load(place) == (b"", b"")
    assert recover(tmp_path).records == [(completed(0), place)]


def test_a_commit_is_due_by_the_count_of_groups_or_by_the_time_of_the_first_record(tmp_path: Path) -> None:
    journal = Journal(tmp_path, settings(commit_groups=2, commit_seconds=5.0), b"")
    now = time.monotonic()
    assert journal.due_at == float("inf")
    journal.append(Saved(oldest=0))
    journal.append_group(completed(0), FRAMES)
    assert not journal.due(now)
    assert now + 5.0 <= journal.due_at
    assert journal.due(time.monotonic() + 5.0)
    journal.append_group(completed(1), FRAMES)
    assert journal.due(time.monotonic())
    journal.commit()
    assert not journal.due(float(2**60))
    journal.close()


def test_a_group_of_more_pieces_than_one_call_takes_is_written_whole(journal: Journal, tmp_path: Path) -> None:
    places = [journal.append_group(completed(i), (b"%d" % i, b"x")) for i in range(3000)]
    journal.commit()
    assert [journal.load(place)[0] for place in places] == [b"%d" % i for i in range(3000)]
    assert len(recover(tmp_path).records) == 3000


def test_a_commit_that_the_disk_begins_in_several_parts_is_written_whole(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr("streamrl.replay.journal._AHEAD", 1000)
    monkeypatch.setattr("os.posix_fadvise", lambda _, offset, length, __: begun.append((offset, offset + length)))
    start = journal.size
    places = [journal.append_group(completed(i), (b"%d" % i, b"x" * (7 * i))) for i in range(100)]
    journal.commit()
    assert [journal.load(place) for place in places] == [(b"%d" % i, b"x" * (7 * i)) for i in range(100)]
    assert len(recover(tmp_path).records) == 100
    assert [start, *(end for _, end in begun[:-1])] == [offset for offset, _ in begun]  # without gap or overlap
    assert all(1000 <= end - offset < 2000 for offset, end in begun)
    assert journal.size - begun[-1][1] < 1000


def test_a_new_writer_begins_a_new_segment_and_old_places_still_load(tmp_path: Path) -> None:
    first = Journal(tmp_path, settings(), b"one")
    place = first.append_group(completed(0), FRAMES)
    first.commit()
    first.close()
    first.close()
    second = Journal(tmp_path, settings(), b"two")
    assert [number for number, _ in segments(tmp_path)] == [0, 1]
    assert second.load(place) == FRAMES
    assert recover(tmp_path).snapshot == b"two"
    assert recover(tmp_path).records == []
    second.close()


def test_rolling_commits_and_goes_on_behind_the_new_snapshot(tmp_path: Path) -> None:
    journal = Journal(tmp_path, settings(segment=4096), b"old")
    assert not journal.full_segment
    place = journal.append_group(completed(0), (b"", b"z" * 4096))
    assert journal.full_segment
    journal.roll(b"new")
    assert not journal.full_segment
    after = journal.append_group(completed(1), FRAMES)
    journal.commit()
    assert (place.segment, after.segment) == (0, 1)
    assert journal.load(place) == (b"", b"z" * 4096)
    recovery = recover(tmp_path)
    assert (recovery.snapshot, recovery.records) == (b"new", [(completed(1), after)])
    journal.close()


def test_compaction_deletes_what_holds_no_group_but_never_the_newest_two(tmp_path: Path) -> None:
    journal = Journal(tmp_path, settings(), b"0")
    for number in range(1, 6):
        journal.roll(b"%d" % number)
    assert journal.compact(2) == [segment_path(tmp_path, number) for number in (0, 1)]
    assert journal.compact(2) == []
    assert journal.compact(None) == [segment_path(tmp_path, number) for number in (2, 3)]
    assert journal.compact(9) == []
    assert recover(tmp_path).snapshot == b"5"
    with pytest.raises(JournalDamaged, match=r"000002\.journal is gone"):
        journal.load(Place(2, 19))
    journal.close()


def test_keeping_all_deletes_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path, settings(keep="all"), b"0")
    for _ in range(4):
        journal.roll(b"")
    assert journal.compact(None) == []
    assert len(segments(tmp_path)) == 5
    journal.close()


def test_a_full_disk_loses_nothing_and_the_next_commit_goes_on(journal: Journal, tmp_path: Path) -> None:
    journal.append_group(completed(0), FRAMES)
    journal.commit()
    whole = journal.size
    places = [journal.append_group(completed(i), (b"h", b"x" * 5000)) for i in (1, 2)]
    with limited_files(whole + 6000):  # the first of the two fits, the second does not
        for _ in range(3):
            with pytest.raises(JournalFull, match=r"cannot grow: File too large.*000000\.journal"):
                journal.commit()
            assert segment_path(tmp_path, 0).stat().st_size == whole
            assert journal.uncommitted == 2
        assert journal.load(places[1]) == (b"h", b"x" * 5000)
        with pytest.raises(JournalFull):
            journal.roll(b"")
    journal.append(consumed(0, 0))
    journal.commit()
    assert [type(record) for record in recover(tmp_path).records] == [tuple, tuple, tuple, Consumed]
    assert recover(tmp_path).repairs == []


def test_a_segment_that_a_full_disk_does_not_take_leaves_no_file_and_the_old_one_in_use(
    journal: Journal, tmp_path: Path
) -> None:
    with limited_files(5000):
        with pytest.raises(JournalFull):
            journal.roll(b"s" * 6000)
        with pytest.raises(JournalFull):
            Journal(tmp_path, settings(), b"s" * 6000)
        assert [number for number, _ in segments(tmp_path)] == [0]
        place = journal.append_group(completed(0), FRAMES)
        journal.commit()
        assert place.segment == 0
    journal.roll(b"s" * 6000)
    assert recover(tmp_path).snapshot == b"s" * 6000


def test_a_file_system_without_room_is_waited_for(small_disk: Path) -> None:
    journal = Journal(small_disk / "journal", settings(), b"")
    filler = small_disk / "filler"
    filler.write_bytes(b"f" * (32 << 10))
    place = journal.append_group(completed(0), (b"h", b"x" * (48 << 10)))
    with pytest.raises(JournalFull, match="No space left on device"):
        journal.commit()
    filler.unlink()
    journal.commit()
    journal.close()
    assert recover(small_disk / "journal").records == [(completed(0), place)]


def test_every_record_is_read_in_the_order_of_writing_over_all_segments(tmp_path: Path) -> None:
    journal = Journal(tmp_path, settings(), b"")
    journal.append_group(completed(3), FRAMES)
    journal.roll(b"")
    journal.append(consumed(0, 3))
    journal.commit()
    journal.close()
    told = [(entry.place.segment, type(entry.record).__name__, entry.frame_bytes) for entry in read_journal(tmp_path)]
    assert told == [(0, "Opening", 0), (0, "Completed", 106), (1, "Opening", 0), (1, "Consumed", 0)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder))
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs needs privileges: {mounted.stderr.strip()}")
    yield folder
    run("umount", str(folder))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=30)

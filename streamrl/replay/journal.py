"""The journal's writer: the buffer's records and the groups' frames on disk, committed in groups.

    append ─▶ in memory ──commit()──▶ written and fsynced ──roll()──▶ next segment ──compact()──▶ deleted

`RUN/journal/` holds numbered segments (`replay/segments.py`). Each begins with a snapshot of the buffer, so that
recovery (`replay/recovery.py`) reads the newest one alone, and older ones only for the frames of groups that are
in them. What was appended is held in memory until its commit; nothing outside may depend on it before.

A disk that takes no more leaves the segment as it was after the last commit and everything newer in memory:
the next commit tries again. So it is where the process may open no further file; the writer keeps a few descriptors
for itself, so that connections cannot take the last ones.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from streamrl.config.replay import JournalConfig
from streamrl.observe.descriptors import NO_DESCRIPTOR, Reserve
from streamrl.observe.disk import NO_ROOM
from streamrl.replay.history import read_journal, recorded_batches
from streamrl.replay.records import AnyRecord, Completed, Place
from streamrl.replay.recovery import Recovery, recover
from streamrl.replay.segments import (
    MAGIC,
    Chunk,
    Frames,
    JournalDamaged,
    Opening,
    encode_record,
    load_frames,
    segment_path,
    segments,
)
from streamrl.whole_files import sync

__all__ = [
    "Journal",
    "JournalDamaged",
    "JournalFailed",
    "JournalFull",
    "Recovery",
    "compact",
    "read_journal",
    "recorded_batches",
    "recover",
]

# Buffers that one call to the operating system takes.
_PIECES = os.sysconf("SC_IOV_MAX")

# Bytes behind which the disk is asked to begin, while the rest is still copied to the kernel: asked more often it makes
# many small writes, and asked never it idles until the fsync.
_AHEAD = 4 << 20

T = TypeVar("T")


class JournalFull(OSError):
    """The disk takes no more, or no file can be opened. What was appended is still in memory; try again later."""


class JournalFailed(OSError):
    """The disk fails. What was committed before is all that can be relied upon: a new service goes on from there."""


class Journal:
    """Appends to a new segment of `folder`. One writer at a time.

    Usage:
        journal = Journal(run_folder / "journal", config.journal, snapshot)
        place = journal.append_group(completed, frames)
        if journal.due(time.monotonic()):
            journal.commit()  # now the worker may be answered
    """

    def __init__(
        self,
        folder: Path,
        config: JournalConfig,
        snapshot: bytes,
        run: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin a segment of `run` whose first record is the buffer's `snapshot`.

        Raises JournalFull, JournalFailed, OSError.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._config = config
        self._clock = clock
        number = max((number for number, _ in segments(folder)), default=-1) + 1
        self._run = run
        self._reserve = Reserve()
        self._segment = self._begin(number, snapshot)
        self._chunks: list[Chunk] = []  # appended and not committed, in order
        self._frames: dict[int, Sequence[Chunk]] = {}  # of the groups among them, by offset
        self._records = 0
        self._since = 0.0  # seconds, when the oldest of them was appended
        self.size = self._segment.size

    @property
    def uncommitted(self) -> int:
        """Records that a crash would lose."""
        return self._records

    @property
    def due_at(self) -> float:
        """When the next commit is due; infinite without anything to commit."""
        if len(self._frames) >= self._config.commit_groups:
            return self._since
        return self._since + self._config.commit_seconds if self._records else float("inf")

    def due(self, now: float) -> bool:
        """`journal.commit_groups` groups, or the first record `journal.commit_seconds` ago, are not committed yet."""
        return now >= self.due_at

    @property
    def full_segment(self) -> bool:
        """The segment has `journal.segment` bytes or more: time to roll."""
        return self.size >= self._config.segment

    def append(self, record: AnyRecord) -> None:
        """Record an event that has no frames."""
        self._append(encode_record(record))

    def append_group(self, record: Completed, frames: Sequence[Chunk]) -> Place:
        """Record an accepted group with its two frames as they came. They must not change until the next commit."""
        place = Place(self._segment.number, self.size)
        self._append(encode_record(record, frames))
        self._frames[place.offset] = frames
        return place

    def commit(self) -> None:
        """Put on disk what was appended since the last commit: one write, one fsync.

        Raises JournalFull when the disk takes no more, JournalFailed when it fails otherwise; the segment then ends
        with the last commit, and after JournalFull the next call tries to write the same again.
        """
        if not self._records:
            return
        self._segment.write(self._chunks)
        self._chunks, self._frames, self._records = [], {}, 0

    def roll(self, snapshot: bytes) -> None:
        """Commit, then begin the next segment with `snapshot`, which has everything that was appended.

        Raises as `commit` does; the journal then goes on in the segment that it has.
        """
        self.commit()
        following = self._begin(self._segment.number + 1, snapshot)
        self._segment.close()
        self._segment, self.size = following, following.size

    def load(self, place: Place, group: tuple[int, int] | None = None) -> Frames:
        """The frames of a group, (id, attempt), committed or not.

        Raises JournalDamaged where they are not whole, JournalFull where no file can be opened now.
        """
        if place.segment == self._segment.number and (frames := self._frames.get(place.offset)):
            header, arena = frames
            return bytes(header), bytes(arena)
        path = segment_path(self._folder, place.segment)
        return self._opened(lambda: load_frames(self._folder, place, group), path)

    def compact(self, oldest: int | None) -> list[Path]:
        """Delete the segments below number `oldest`, the lowest that still holds a group (None: none does).

        The segment in use and the one before it stay: on that one recovery falls back where the snapshot of
        the newest cannot be read. Returns what was deleted, nothing with `journal.keep=all`. Raises JournalFull
        where the folder cannot be opened now.
        """
        return self._opened(lambda: compact(self._folder, self._config, oldest), self._folder)

    def close(self) -> None:
        """Let go of the file; what is not committed is lost. May be called twice."""
        self._segment.close()
        self._reserve.close()

    def _begin(self, number: int, snapshot: bytes) -> _Segment:
        """A new segment. Raises JournalFull, OSError."""
        opening = Opening(time=time.time(), segment=number, run=self._run, keep=self._config.keep)
        return self._opened(lambda: _Segment(self._folder, opening, snapshot), segment_path(self._folder, number))

    def _opened(self, call: Callable[[], T], path: Path) -> T:
        """What a `call` that opens files returns. Raises what it raises, and JournalFull where none can be opened."""
        try:
            return self._reserve.attempt(call)
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
            raise JournalFull(error.errno, f"the journal cannot open a file: {error.strerror}", str(path)) from error

    def _append(self, chunks: list[Chunk]) -> None:
        if not self._records:
            self._since = self._clock()
        self._records += 1
        self._chunks += chunks
        self.size += sum(len(chunk) for chunk in chunks)


def compact(folder: Path, config: JournalConfig, oldest: int | None) -> list[Path]:
    """As `Journal.compact`, of a journal that nobody is writing."""
    found = segments(folder)
    if config.keep == "all" or not found:
        return []
    recoverable = [number for number, _ in found][-2:]
    limit = min(recoverable) if oldest is None else min(oldest, *recoverable)
    deleted = [path for number, path in found if number < limit]
    for path in deleted:
        path.unlink()
    return deleted


class _Segment:
    """The file of a segment that is being written. All of its `size` bytes are whole records, and on disk."""

    def __init__(self, folder: Path, opening: Opening, snapshot: bytes) -> None:
        assert opening.segment is not None
        self.number = number = opening.segment
        self.size = 0
        self._path = segment_path(folder, number)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self.write([MAGIC, *encode_record(opening, (snapshot, b""))])
            sync(folder)
        except OSError:
            self.close()
            self._path.unlink()
            raise

    def write(self, chunks: Sequence[Chunk]) -> None:
        """Append and fsync, or leave the file as it was. Raises JournalFull, JournalFailed."""
        try:
            end = _write(self._file, chunks, self.size)
            os.fdatasync(self._file)
        except OSError as error:
            # After a failed fsync the kernel may have dropped the pages: all of it has to be written again.
            with contextlib.suppress(OSError):  # recovery cuts off what is left
                os.ftruncate(self._file, self.size)
            if error.errno in NO_ROOM:
                raise JournalFull(error.errno, f"the journal cannot grow: {error.strerror}", str(self._path)) from error
            what = f"the journal cannot be written: {error.strerror}; check the disk, what is committed is safe"
            raise JournalFailed(error.errno, what, str(self._path)) from error
        self.size = end

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _write(file: int, chunks: Sequence[Chunk], offset: int) -> int:
    """Write all chunks from `offset` on, however many calls that takes. Returns the offset behind them."""
    waiting = [memoryview(chunk).cast("B") for chunk in chunks if len(chunk)]
    first, begun = 0, offset
    while first < len(waiting):
        written = os.pwritev(file, waiting[first : _end_of_piece(waiting, first)], offset)
        offset += written
        while first < len(waiting) and written >= len(waiting[first]):
            written -= len(waiting[first])
            first += 1
        if written:
            waiting[first] = waiting[first][written:]
        if offset - begun >= _AHEAD:
            os.posix_fadvise(file, begun, offset - begun, os.POSIX_FADV_DONTNEED)
            begun = offset
    return offset


def _end_of_piece(chunks: Sequence[memoryview], first: int) -> int:
    """Up to which chunk one call writes: about _AHEAD bytes."""
    size, end = 0, first
    while size < _AHEAD and end < min(first + _PIECES, len(chunks)):
        size += len(chunks[end])
        end += 1
    return end

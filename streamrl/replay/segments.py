"""The format of the journal's segments: checksummed records, appended and never changed.

`RUN/journal/NNNNNN.journal` is a magic line and then records, little-endian:

    checksum u64 | checksum of the frames u64 | lengths: record u32, frame 0 u32, frame 1 u64 | record | frames 0, 1

The record is one of `replay/records.py` in msgpack, or the segment's `Opening`, which comes first. Frames follow
two of them: a `Completed` has the two frames of its group as they came (`stream/codec.py`), an `Opening` a
snapshot of the buffer. Each has a checksum of its own: damage in the long frames costs one group, not what follows.

The checksum is XXH3-64, as everywhere in streamrl: it misses damage once in 2**64 times and is several times as fast
as a disk writes, where zlib's CRC-32 takes a third of the journal's bandwidth. It is no protection against intent.
"""

from __future__ import annotations

import errno
import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import xxhash

from streamrl.replay.records import AnyRecord, Completed, Place, Record

MAGIC = b"streamrl journal 2\n"
_HEAD = struct.Struct("<QQIIQ")
_CHECKED = struct.Struct("<QIIQ")  # the head behind its own checksum, which covers this and the record
_NAME = re.compile(r"(\d{6,})\.journal")

_BEGINNING = re.compile(rb"[\x80-\x8f]\xa4type")  # of a record in msgpack: its tag comes first

Chunk = bytes | memoryview
Frames = tuple[bytes, bytes]


class JournalDamaged(ValueError):
    """What is in the journal is not what was written, or is not there any more."""


class Opening(Record, frozen=True, kw_only=True):
    """The first record of a segment. Frame 0 is the buffer's snapshot as of here, frame 1 is empty."""

    time: float  # seconds since the epoch
    segment: int | None = None  # its own number; None in segments from before it was kept
    run: str | None = None  # id of the run; None from before runs had ids
    keep: str | None = None  # `journal.keep` under which it is written; None in segments from before it was noted


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AnyRecord | Opening)


@dataclass(frozen=True, slots=True)
class Entry:
    """One readable record and where it is. Its frames are read by `load_frames(folder, entry.place)`."""

    place: Place
    record: AnyRecord | Opening
    end: int  # offset behind the record and its frames
    frame_bytes: int  # size of the frames; 0 for a record without


@dataclass(frozen=True, slots=True)
class Unreadable:
    """From here on a segment cannot be read."""

    place: Place
    size: int  # bytes, to the end of the file
    reason: str
    torn: bool  # it looks like the end of an interrupted write; False: it was whole once
    misnamed: bool = False  # all of it is another segment

    def __str__(self) -> str:
        what = "torn tail" if self.torn else "damage"
        return (
            f"segment {self.place.segment:06d}: {what} of {self.size} bytes at byte {self.place.offset}: {self.reason}"
        )


def segments(folder: Path) -> list[tuple[int, Path]]:
    """(number, path) of the segments in a folder, in order; other files are passed over."""
    found = [(match, path) for path in folder.glob("*.journal") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.journal"


def encode_record(record: AnyRecord | Opening, frames: Sequence[Chunk] = ()) -> list[Chunk]:
    """The bytes of a record in pieces to be written one behind the other; frames are not copied."""
    first, second = frames or (b"", b"")
    body = _ENCODER.encode(record)
    checked = _CHECKED.pack(_checksum(first, second), len(body), len(first), len(second))
    return [_checksum(checked, body).to_bytes(8, "little") + checked + body, *frames]


def scan(number: int, path: Path) -> Iterator[Entry | Unreadable]:
    """The records of a segment in order, without their frames; at last an `Unreadable` where it does not end whole."""
    with path.open("rb") as file:
        end = path.stat().st_size
        place = Place(number, 0)
        try:
            if (magic := file.read(len(MAGIC))) != MAGIC:
                yield Unreadable(place, end, "it does not begin as a segment", torn=MAGIC.startswith(magic))
                return
            while (offset := file.tell()) < end:
                place = Place(number, offset)
                entry = _checked(_read_entry(file, place, end), end)
                yield entry
                if isinstance(entry, Unreadable):
                    return
                file.seek(entry.end)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            yield Unreadable(place, end - place.offset, f"it cannot be read: {error.strerror}", torn=False)


def opening(number: int, path: Path) -> Opening | None:
    """The opening of a segment; None where it cannot be read."""
    first = next(scan(number, path), None)
    return first.record if isinstance(first, Entry) and isinstance(first.record, Opening) else None


def load_frames(folder: Path, place: Place, group: tuple[int, int] | None = None) -> Frames:
    """The two frames of the record at a place. `group`: the (group id, attempt) that was written there.

    Raises JournalDamaged, naming the place, where they are not whole, or where another group's record, or another
    segment, is there.
    """
    path = segment_path(folder, place.segment)
    try:
        with path.open("rb") as file:
            end = path.stat().st_size
            if reason := _misnamed(file, place.segment, end):
                raise JournalDamaged(f"{path}: {reason}")
            file.seek(place.offset)
            entry = _read_entry(file, place, end)
            if isinstance(entry, Unreadable):
                raise JournalDamaged(f"{path}: the record at byte {place.offset} is unreadable: {entry.reason}")
            if group is not None and _group_of(entry.record) != group:
                raise JournalDamaged(f"{path}: the record at byte {place.offset} is not that of group {group[0]}")
            return _read_frames(file, entry, path)
    except FileNotFoundError as error:
        raise JournalDamaged(f"{path} is gone, and with it the record at byte {place.offset}") from error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise JournalDamaged(f"{path}: the record at byte {place.offset}: {error.strerror}") from error


def _checked(entry: Entry | Unreadable, end: int) -> Entry | Unreadable:
    """An opening must be that of its segment: a file that was copied under another name is damage as a whole."""
    if isinstance(entry, Entry) and isinstance(entry.record, Opening):
        number = entry.record.segment
        if number not in (None, entry.place.segment):
            reason = f"it is segment {number:06d} under another name"
            return Unreadable(entry.place, end - entry.place.offset, reason, torn=False, misnamed=True)
    return entry


def _misnamed(file: BinaryIO, number: int, end: int) -> str | None:
    """Why all of a segment is another one; None where its opening does not say so, or cannot be read."""
    file.seek(len(MAGIC))
    try:
        first = _checked(_read_entry(file, Place(number, len(MAGIC)), end), end)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return None
    return first.reason if isinstance(first, Unreadable) and first.misnamed else None


def _group_of(record: AnyRecord | Opening) -> tuple[int, int] | None:
    return (record.group_id, record.attempt) if isinstance(record, Completed) else None


def _checksum(*parts: Chunk) -> int:
    """XXH3-64 of the parts, each seeded by the one before: where one ends and the next begins counts too."""
    checksum = 0
    for part in parts:
        checksum = xxhash.xxh3_64_intdigest(part, checksum)
    return checksum


def _read_entry(file: BinaryIO, place: Place, end: int) -> Entry | Unreadable:
    """The record at the file's position; leaves the file at its frames. `end` is the size of the file in bytes."""
    size = end - place.offset
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return Unreadable(place, size, "the file ends inside the head of a record", torn=True)
    checksum, _, length, first, second = _HEAD.unpack(head)
    whole = _HEAD.size + length + first + second
    if whole > size and length > size:  # not worth reading, the length alone may be the damage
        torn = not _goes_on(file, place.offset + 1)
        return Unreadable(place, size, "the file ends inside a record, as its head says", torn=torn)
    body = file.read(length)
    if _checksum(head[8:], body) != checksum:
        torn = whole >= size and not _goes_on(file, place.offset + 1)
        return Unreadable(place, size, "it does not match its checksum", torn=torn)
    if whole > size:
        return Unreadable(place, size, "the file ends inside the frames of a record", torn=True)
    try:
        record = _DECODER.decode(body)
    except msgspec.DecodeError as error:
        return Unreadable(place, size, f"it is of another version: {error}", torn=False)
    return Entry(place, record, place.offset + whole, first + second)


def _goes_on(file: BinaryIO, offset: int) -> bool:
    """Whether a whole record comes after `offset`: no interrupted write leaves one behind what it interrupted."""
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for match in _BEGINNING.finditer(content, offset + _HEAD.size):
            head = content[match.start() - _HEAD.size : match.start()]
            checksum, _, length, _, _ = _HEAD.unpack(head)
            body = content[match.start() : match.start() + length]
            if len(body) == length and _checksum(head[8:], body) == checksum:
                return True
    return False


def _read_frames(file: BinaryIO, entry: Entry, path: Path) -> Frames:
    file.seek(entry.place.offset)
    _, checksum, length, first_length, second_length = _HEAD.unpack(file.read(_HEAD.size))
    file.seek(length, 1)
    first, second = file.read(first_length), file.read(second_length)
    if _checksum(first, second) != checksum:
        raise JournalDamaged(
            f"{path}: the frames of the record at byte {entry.place.offset} do not match their checksum"
        )
    return first, second

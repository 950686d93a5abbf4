"""The record of a run's data: every accepted group as it came, and which groups each step consumed.

`RUN/journal/` holds numbered segments, one for each start of the service. A segment is its magic line and
then records, appended and never changed:

    crc32 u32 | kind u8 | length of frame 0 u32 | length of frame 1 u64 | frame 0 | frame 1    (little-endian)

kind 1 is a group (its two frames, byte for byte), kind 2 a batch (step and the ids of its groups, in
order). The checksum covers everything behind it.

What this holds on to now: records are buffered and handed to the operating system at every batch, so a
killed service loses groups that no step has consumed; a machine that loses power may lose more. Recovery
(group commit before a group is accepted, batch records before delivery) is to be built on `append_group` and
`append_batch`: the service calls the one before Accepted leaves and the other before the batch does.

A run that was resumed has trained some steps twice. Reading follows the surviving history: a batch record
replaces the records of its step and of all later ones.
"""

from __future__ import annotations

import logging
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from streamrl.stream.codec import decode_group, ticket_of
from streamrl.types import Batch

log = logging.getLogger(__name__)

MAGIC = b"streamrl journal 1\n"
_HEAD = struct.Struct("<IBIQ")
_CHECKED = struct.Struct("<BIQ")  # the head behind its checksum
_GROUP, _BATCH = 1, 2
_SEGMENT = re.compile(r"(\d{6})\.journal")
_BUFFER = 1 << 20
# bytes gathered before a write; larger frames pass it by.


class JournalDamaged(ValueError):
    """A record in the middle of a segment is not what was written."""


class _BatchRecord(msgspec.Struct, frozen=True):
    step: int
    group_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """An accepted group: its frames (`stream/codec.py`)."""

    header: bytes
    arena: bytes


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A step and the groups that it consumed, in order."""

    step: int
    group_ids: tuple[int, ...]


class Journal:
    """Appends to a new segment of `folder`. Not for several writers at once."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [number for number, _ in _segments(folder)]
        self.path = folder / f"{max(numbers, default=-1) + 1:06d}.journal"
        self._file = open(self.path, "xb", buffering=_BUFFER)  # noqa: SIM115  closed by close()
        self._file.write(MAGIC)
        self._file.flush()

    def append_group(self, frames: Sequence[bytes | memoryview]) -> None:
        """Record an accepted group; frames as they were received."""
        header, arena = frames
        self._append(_GROUP, header, arena)

    def append_batch(self, step: int, group_ids: Sequence[int]) -> None:
        """Record what a step consumes, and hand everything so far to the operating system."""
        self._append(_BATCH, msgspec.msgpack.encode(_BatchRecord(step, tuple(group_ids))), b"")
        self._file.flush()

    def close(self) -> None:
        """May be called twice."""
        self._file.close()

    def _append(self, kind: int, first: bytes | memoryview, second: bytes | memoryview) -> None:
        head = _CHECKED.pack(kind, len(first), len(second))
        checksum = zlib.crc32(second, zlib.crc32(first, zlib.crc32(head)))
        for part in (struct.pack("<I", checksum), head, first, second):
            self._file.write(part)


def read_journal(folder: Path) -> Iterator[GroupRecord | BatchRecord]:
    """Every record in the order of writing.

    The torn tail of a segment, which a kill leaves, is cut and told in the log. Raises JournalDamaged for a
    record in the middle that does not match its checksum.
    """
    for _, path in _segments(folder):
        with path.open("rb") as file:
            for _, kind, first, second in _records(file, path):
                yield _record(kind, first, second)


def recorded_batches(folder: Path) -> Iterator[Batch]:
    """The batches that were trained in the surviving history, decoded, in the order of their steps.

    Two passes: the first notes where the groups stand, the second reads one batch at a time, so that
    memory holds one batch. Raises JournalDamaged; a step without its groups is such a damage.
    """
    groups: dict[int, tuple[Path, int]] = {}
    steps: dict[int, list[tuple[Path, int]]] = {}
    for _, path in _segments(folder):
        with path.open("rb") as file:
            for offset, kind, first, second in _records(file, path):
                record = _record(kind, first, second)
                if isinstance(record, GroupRecord):
                    group_id, _ = ticket_of(record.header)
                    groups[group_id] = (path, offset)
                    continue
                for later in [step for step in steps if step >= record.step]:
                    del steps[later]
                if missing := [i for i in record.group_ids if i not in groups]:
                    raise JournalDamaged(f"{path}: step {record.step} without its groups {missing}")
                steps[record.step] = [groups[i] for i in record.group_ids]
    for step, places in sorted(steps.items()):
        yield Batch(step=step, groups=tuple(decode_group(*_group_at(*place)) for place in places))


def _segments(folder: Path) -> list[tuple[int, Path]]:
    """(number, path) of the segments, in order."""
    found = [(match, path) for path in folder.glob("*.journal") if (match := _SEGMENT.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in found)


def _records(file: BinaryIO, path: Path) -> Iterator[tuple[int, int, bytes, bytes]]:
    """(offset, kind, frame 0, frame 1) of every whole record."""
    end = path.stat().st_size
    if (magic := file.read(len(MAGIC))) != MAGIC:
        if MAGIC.startswith(magic):
            return _tell_cut(path, 0, end)
        raise JournalDamaged(f"{path} does not begin as a journal of this version")
    while (offset := file.tell()) < end:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return _tell_cut(path, offset, end)
        checksum, kind, first_length, second_length = _HEAD.unpack(head)
        stop = offset + _HEAD.size + first_length + second_length
        if stop > end:
            return _tell_cut(path, offset, end)
        first, second = file.read(first_length), file.read(second_length)
        if zlib.crc32(second, zlib.crc32(first, zlib.crc32(head[4:]))) != checksum:
            if stop == end:
                return _tell_cut(path, offset, end)
            raise JournalDamaged(f"{path}: the record at byte {offset} does not match its checksum")
        yield offset, kind, first, second
    return None


def _tell_cut(path: Path, offset: int, end: int) -> None:
    log.warning("%s: torn tail of %d bytes at byte %d is left out", path, end - offset, offset)


def _record(kind: int, first: bytes, second: bytes) -> GroupRecord | BatchRecord:
    if kind == _GROUP:
        return GroupRecord(first, second)
    record = msgspec.msgpack.decode(first, type=_BatchRecord)
    return BatchRecord(record.step, record.group_ids)


def _group_at(path: Path, offset: int) -> tuple[bytes, bytes]:
    with path.open("rb") as file:
        file.seek(offset)
        _, _, first_length, second_length = _HEAD.unpack(file.read(_HEAD.size))
        return file.read(first_length), file.read(second_length)

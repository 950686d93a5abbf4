"""What a crash has left of the journal: the state to go on from, with everything unreadable cut off and reported.

Recovery begins at the newest segment whose snapshot is whole and follows the records behind it up to the first that
cannot be read. There the journal is cut, on disk too: a prefix of the history is a state that the buffer has been
in, and what is missing is issued or generated again. Only where the frames of a group are damaged and its record is
not does the history go on: that group is restored as completed without a place, and is generated again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.replay.records import AnyRecord, Completed, Place
from streamrl.replay.segments import (
    MAGIC,
    Entry,
    JournalDamaged,
    Opening,
    Unreadable,
    load_frames,
    opening,
    scan,
    segments,
)
from streamrl.stream.identity import RunIdentity
from streamrl.whole_files import drafted

# Suffix of a segment that is not read any more and was whole once: it is kept for inspection.
SET_ASIDE = ".damaged"

_PIECE = 1 << 20  # bytes that are copied at once


@dataclass(slots=True)
class Recovery:
    """What `Buffer.restore` is given. A `Completed` comes with its place; one that comes alone has lost its frames."""

    snapshot: bytes | None = None  # None: a buffer that nothing has happened to yet
    records: list[AnyRecord | tuple[Completed, Place]] = field(default_factory=list)  # since then, in order
    repairs: list[str] = field(default_factory=list)  # what was cut and what was lost, a sentence each


def refuse_another_run(folder: Path, run: RunIdentity) -> None:
    """Raise AnotherRun where a segment of the journal is not of this run: its groups would be trained as the run's."""
    for number, path in segments(folder):
        if (first := opening(number, path)) is not None:
            run.check(path, first.run)


def recover(folder: Path) -> Recovery:
    """Read what the last writer left, which must be gone, and cut off what cannot be read.

    Never raises for what a file contains; OSError where the folder cannot be read or cut. A second call finds
    what the first has left, and cuts nothing.
    """
    recovery = Recovery()
    found = segments(folder)
    base = _base(folder, found, recovery)
    for index, (number, path) in enumerate(found[base:], base):
        if cut := _follow(folder, number, path, recovery):
            recovery.repairs.append(f"{folder}: {cut}; it is cut")
            begins = cut.place.offset > len(MAGIC)
            # First: behind a segment that is cut already they would seem to continue it.
            _set_aside([path for _, path in found[index + begins :]], recovery)
            if begins:
                _cut(path, cut)
            break
    return recovery


def _base(folder: Path, found: list[tuple[int, Path]], recovery: Recovery) -> int:
    """Index of the segment that recovery begins with; its snapshot goes into `recovery`."""
    for index, (number, path) in reversed(list(enumerate(found))):
        first = next(scan(number, path), None)
        if isinstance(first, Entry) and isinstance(first.record, Opening):
            try:
                recovery.snapshot, _ = load_frames(folder, first.place)
                return index
            except JournalDamaged as error:
                recovery.repairs.append(f"{error}: an older snapshot is taken")
    if found and found[0][0] > 0:
        recovery.repairs.append(f"{folder}: no snapshot can be read, the buffer begins empty")
        _set_aside([path for _, path in found], recovery)
        return len(found)
    return 0  # the first segment of all begins with an empty buffer


def _follow(folder: Path, number: int, path: Path, recovery: Recovery) -> Unreadable | None:
    """Add a segment's records to `recovery`. Returns what cannot be read, if it does not end whole."""
    size = path.stat().st_size
    spoilt: list[Unreadable] = []  # the groups directly before whose frames are damaged
    for entry in scan(number, path):
        if isinstance(entry, Unreadable):
            return _with(spoilt, entry, recovery)
        if isinstance(entry.record, Opening):
            continue
        if not isinstance(entry.record, Completed):
            recovery.records.append(entry.record)
            spoilt = []
            continue
        try:
            load_frames(folder, entry.place)
        except JournalDamaged as error:
            damage = Unreadable(entry.place, size - entry.place.offset, str(error), torn=True)
            if entry.end == size:
                return _with(spoilt, damage, recovery)
            recovery.repairs.append(f"{error}: group {entry.record.group_id} is generated again")
            recovery.records.append(entry.record)
            spoilt.append(damage)
        else:
            recovery.records.append((entry.record, entry.place))
            spoilt = []
    return None


def _with(spoilt: list[Unreadable], cut: Unreadable, recovery: Recovery) -> Unreadable:
    """The cut, or an earlier one: damaged groups that would be the end of the segment behind the cut go with it."""
    if not spoilt:
        return cut
    del recovery.repairs[-len(spoilt) :], recovery.records[-len(spoilt) :]
    return spoilt[0]


def _cut(path: Path, cut: Unreadable) -> None:
    """End the segment before what cannot be read. What was whole once, and may be on a better day, is kept beside."""
    if cut.torn:
        with path.open("r+b") as file:
            file.truncate(cut.place.offset)
            os.fsync(file.fileno())
        return
    kept = path.with_name(path.name + SET_ASIDE)
    with drafted(path, durable=True) as draft:
        with path.open("rb") as whole, draft.open("wb") as begin:
            for done in range(0, cut.place.offset, _PIECE):
                begin.write(whole.read(min(_PIECE, cut.place.offset - done)))
        kept.unlink(missing_ok=True)
        os.link(path, kept)


def _set_aside(paths: list[Path], recovery: Recovery) -> None:
    """Take out of the journal what follows a cut: its records continue a history that is not there any more."""
    for path in paths:
        recovery.repairs.append(f"{path}: set aside, it does not continue what could be read")
        path.rename(path.with_name(path.name + SET_ASIDE))

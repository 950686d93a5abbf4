"""The buffer and its journal as one: nothing leaves the service before the records that it rests on are on the disk.

    the buffer decides ─▶ record, numbered ─▶ journal, in memory ─▶ commit: one fsync for all ─▶ what waited may leave

Code that sends something that rests on a record notes its number (`mark`) and sends it when `is_durable(mark)`. A full
disk only stops that number: the journal keeps what it could not write, and a commit is tried again every second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from streamrl.config import Config
from streamrl.observe.events import Events
from streamrl.replay.buffer import Stored, make_buffer
from streamrl.replay.journal import Journal, JournalDamaged, JournalFull, compact, recover
from streamrl.replay.lives import NEVER
from streamrl.replay.records import Completed, Snapshot
from streamrl.replay.recovery import refuse_another_run
from streamrl.stream.codec import decode_group, encode_group
from streamrl.stream.identity import RunIdentity, run_identity
from streamrl.trainable import Limits
from streamrl.types import Group, Ledger, PolicyVersion, Sample, Ticket

log = logging.getLogger(__name__)

# Seconds between two tries to write on a full disk.
RETRY = 1.0

Frame = bytes | memoryview

_IN_MEMORY = RunIdentity(id="in-memory")


class DurableBuffer:
    """The buffer of a run, recovered from its journal. `close` it.

    Usage:
        durable = DurableBuffer(config, run_folder, events)
        record = durable.complete("generator-0", group, frames)
        mark = durable.mark
        durable.tick(time.monotonic())
        durable.is_durable(mark)  # once `journal.commit_seconds` are over
        # False
    """

    def __init__(
        self, config: Config, run_folder: Path | None, events: Events, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Recover the state that the last service left, then begin a segment.

        `run_folder`: None for a run in memory, which has no journal. `clock`: the one by which all calls tell the
        time. Raises JournalFull, JournalFailed, JournalDamaged, and ConfigError where the journal is another run's.
        """
        self.buffer = make_buffer(config)
        self.run = _IN_MEMORY if run_folder is None else self._recover(config, run_folder, events)
        self.full = False  # the disk takes no more
        self.mark = 0  # number of the last record
        self._durable = 0  # number of the last one on the disk
        self._retry = float("-inf")
        self._config = config
        self._events = events
        self._journal: Journal | None = None
        if run_folder is not None and config.journal.keep != "none":
            self._journal = self._open(run_folder / "journal", clock)

    @property
    def due_at(self) -> float:
        """When `tick` has something to do."""
        if self._journal is None:
            return NEVER
        return self._retry if self.full else self._journal.due_at

    def is_durable(self, mark: int) -> bool:
        """Is the record of this number on the disk? Without a journal every one counts as such."""
        return mark <= self._durable

    def begin(self, version: PolicyVersion, ledger: Ledger | None, limits: Limits | None = None) -> None:
        """A learner starts, or starts again."""
        self.buffer.begin(version, ledger, limits)
        self.append()

    def ledger(self) -> Ledger:
        """What the weights contain once the batch taken last is trained, with the run whose groups they are."""
        return replace(self.buffer.ledger(), run=self.run.id)

    def complete(self, worker: str, group: Group, frames: Sequence[Frame]) -> Completed | None:
        """Take a worker's group. None: a filter dropped it. Raises GroupRefused."""
        self.append()
        record = self.buffer.complete(worker, group, frames, _size(frames))
        self.append(frames)
        return record

    def give_up(self, ticket: Ticket) -> None:
        """End a ticket that was lost too often, or for too long, as a group of placeholders."""
        group = Group(
            group_id=ticket.group_id,
            attempt=ticket.attempt,
            task=ticket.task,
            prompt_index=ticket.prompt_index,
            samples=(Sample.placeholder(failure="lost"),) * self._config.generate.group_size,
        )
        frames = encode_group(group, self._config.stream.max_message)
        self.append()
        self.buffer.complete_placeholder(group, frames, _size(frames))
        self.append(frames)

    def append(self, frames: Sequence[Frame] = ()) -> None:
        """Append what the buffer has decided since the last call; `frames` of the group that it has taken."""
        if self.buffer.emitted:
            self._emit()
        if not (records := self.buffer.drain()):
            return
        if self._journal is None:
            self.mark = self._durable = self.mark + len(records)
            return
        for record in records:
            self.mark += 1
            if isinstance(record, Completed):
                self.buffer.placed(record.group_id, self._journal.append_group(record, frames))
            else:
                self._journal.append(record)

    def load(self, step: int, groups: Sequence[Stored]) -> list[Frame] | None:
        """The frames of all groups of a step, of a quarantined one those of placeholders.

        None where some are lost: these groups are generated again. Raises JournalFull where no file can be opened now.
        """
        frames: list[Frame] = []
        lost: list[int] = []
        for stored in groups:
            try:
                found = self._frames(stored)
            except JournalDamaged as error:
                lost.append(stored.group_id)
                log.error("group %d is generated again: %s", stored.group_id, error)
                self._events.emit("journal.damage", told=str(error), group_id=stored.group_id)
            else:
                frames += self._emptied(found) if stored.quarantined else found
        if lost:
            self.buffer.lose(step, lost)
            self.append()
        return None if lost else frames

    def saved(self, oldest: int, now: float) -> None:
        """No step before `oldest` is delivered again: forget it, and delete the segments that only it needed."""
        self.buffer.saved(oldest)
        self.commit(now)  # a full disk does not take it, and needs what follows all the more
        try:
            deleted = self._journal.compact(self.buffer.oldest_place()) if self._journal is not None else []
        except JournalFull as error:
            log.warning("%s; older segments stay until the next checkpoint", error)
            return
        if not deleted:
            return
        self._events.emit("journal.compacted", segments=len(deleted), oldest=oldest)
        if self.full:
            self._retry = now
            self.commit(now)

    def tick(self, now: float) -> None:
        """Commit when it is time."""
        self.append()
        if now >= self.due_at:
            self.commit(now)

    def commit(self, now: float) -> bool:
        """Put everything on the disk. False when that is full, or was less than `RETRY` seconds ago."""
        self.append()
        if self._journal is None:
            return True
        if self.full and now < self._retry:
            return False
        try:
            self._journal.commit()
            self._durable = self.mark
            if self._journal.full_segment:
                self._journal.roll(self._snapshot())
        except JournalFull as error:
            self._stand_still(error, now)
            return False
        if self.full:
            self.full = False
            log.warning("the journal can be written again: the run goes on")
            self._events.emit("journal.room")
        return True

    def close(self) -> None:
        """Let go of the journal; what is not committed was promised to nobody."""
        if self._journal is not None:
            self._journal.close()

    def _recover(self, config: Config, run_folder: Path, events: Events) -> RunIdentity:
        """What the last service left, and whose run it is."""
        folder, run = run_folder / "journal", run_identity(run_folder, config.run.id)
        refuse_another_run(folder, run)
        recovery = recover(folder)
        self.buffer.restore(_decoded(recovery.snapshot, folder), recovery.records)
        for line in recovery.repairs:
            log.warning("%s", line)
            events.emit("journal.damage", told=line)
        if recovery.snapshot is not None or recovery.records:
            events.emit("journal.recovered", step=self.buffer.next_step, records=len(recovery.records))
        return run

    def _emit(self) -> None:
        for event, fields in self.buffer.emitted:
            self._events.emit(event, **fields)
        self.buffer.emitted.clear()

    def _frames(self, stored: Stored) -> Sequence[Frame]:
        if stored.frames is not None:
            return stored.frames
        if self._journal is None or stored.place is None:
            raise JournalDamaged(f"group {stored.group_id} is neither in memory nor in a journal")
        return self._journal.load(stored.place, (stored.group_id, stored.attempt))

    def _emptied(self, frames: Sequence[Frame]) -> Sequence[Frame]:
        return encode_group(decode_group(*frames).emptied, self._config.stream.max_message)

    def _stand_still(self, error: JournalFull, now: float) -> None:
        self._retry = now + RETRY
        if self.full:
            return
        self.full = True
        log.error("%s; no more tickets until there is room, nothing is lost", error)
        self._events.emit("journal.full", reason=str(error))

    def _open(self, folder: Path, clock: Callable[[], float]) -> Journal:
        """Begin a segment. Where the disk is full, what no checkpoint needs makes room for it."""
        try:
            return Journal(folder, self._config.journal, self._snapshot(), self.run.id, clock)
        except JournalFull:
            if not compact(folder, self._config.journal, self.buffer.oldest_place()):
                raise
        return Journal(folder, self._config.journal, self._snapshot(), self.run.id, clock)

    def _snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self.buffer.snapshot())


def _decoded(snapshot: bytes | None, folder: Path) -> Snapshot | None:
    """Raises JournalDamaged: its checksum is right, so that another version of streamrl has written it."""
    try:
        return None if snapshot is None else msgspec.msgpack.decode(snapshot, type=Snapshot)
    except msgspec.DecodeError as error:
        raise JournalDamaged(f"{folder}: its snapshot is of another version of streamrl: {error}") from error


def _size(frames: Sequence[Frame]) -> int:
    return sum(map(len, frames))

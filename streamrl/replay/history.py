"""What the journal says has happened: every record in order, what became of each group, and the trained batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from streamrl.replay.records import (
    AnyRecord,
    Began,
    Completed,
    Consumed,
    Dropped,
    Issued,
    Lost,
    Place,
    Quarantined,
    Saved,
    Snapshot,
)
from streamrl.replay.segments import Entry, JournalDamaged, Opening, load_frames, scan, segments
from streamrl.stream.codec import decode_group
from streamrl.stream.identity import AnotherRun
from streamrl.types import Batch, PolicyVersion

log = logging.getLogger(__name__)

STATES = ("waiting", "issued", "completed", "consumed", "committed")


@dataclass(slots=True)
class Contents:
    """What the records of a journal add up to. Where segments were compacted away it begins in the middle.

    A group waits for a ticket, is issued, completed, consumed by a step, and committed once no checkpoint is kept
    that is older than its step. One that was dropped or whose frames are lost waits again.
    """

    state: dict[int, str] = field(default_factory=dict)  # group id: the newest of STATES
    steps: dict[int, tuple[int, ...]] = field(default_factory=dict)  # step: its groups, in order
    completed: dict[int, int] = field(default_factory=dict)  # group id: attempt whose group is the valid one
    dropped: dict[tuple[int, int], str] = field(default_factory=dict)  # (group id, attempt): why
    # (group id, attempt): first step that consumed it and did not train it
    quarantined: dict[tuple[int, int], int] = field(default_factory=dict)
    reused: dict[int, tuple[int, ...]] = field(default_factory=dict)  # step: those of its groups that others had before
    unknown: set[int] = field(default_factory=set)  # steps that need not have trained the groups of their record
    began: list[PolicyVersion] = field(default_factory=list)  # starts of learners
    tickets: int = 0  # attempts that were issued

    def add(self, record: AnyRecord) -> None:
        """One record, in the order of writing."""
        match record:
            case Issued(ticket=ticket):
                self.tickets += 1
                self.state[ticket.group_id] = "issued"
            case Completed(group_id=group_id, attempt=attempt):
                self.state[group_id] = "completed"
                self.completed[group_id] = attempt
                self.quarantined.pop((group_id, attempt), None)
            case Dropped(group_id=group_id, attempt=attempt, reason=reason):
                self.state[group_id] = "waiting"
                self.dropped[group_id, attempt] = reason
            case Consumed(step=step, group_ids=group_ids):
                self._undo(step)
                self.steps[step], self.reused[step] = group_ids, record.reused
                self._set(group_ids, "consumed")
            case Lost(step=step, group_ids=group_ids):
                self._undo(step)
                self._lose(group_ids)
            case Quarantined(step=step, group_id=group_id, attempt=attempt):
                self.quarantined[group_id, attempt] = step
            case Saved(oldest=oldest):
                kept = {group_id for step in self._others() if step >= oldest for group_id in self.steps[step]}
                settled = (i for step, ids in self.steps.items() if step < oldest for i in ids)
                self._set((group_id for group_id in settled if group_id not in kept), "committed")
            case Began():
                self._begin(record)

    def uses(self) -> dict[int, tuple[int, ...]]:
        """Group id: the steps that consumed it, ascending."""
        uses: dict[int, tuple[int, ...]] = {}
        for step, group_ids in sorted(self.steps.items()):
            uses |= {group_id: (*uses.get(group_id, ()), step) for group_id in group_ids}
        return uses

    def positions(self) -> dict[int, tuple[int, ...]]:
        """Group id: its position in the batch of each of these steps, from 0."""
        positions: dict[int, tuple[int, ...]] = {}
        for _, group_ids in sorted(self.steps.items()):
            positions |= {group_id: (*positions.get(group_id, ()), at) for at, group_id in enumerate(group_ids)}
        return positions

    def is_out(self, step: int, group_id: int, attempt: int) -> bool:
        """Did this step get placeholders in the place of the group?"""
        since = self.quarantined.get((group_id, attempt))
        return since is not None and step >= since

    def _begin(self, record: Began) -> None:
        """A learner's start takes back steps that cannot be delivered as they were, and knows what was trained."""
        self.began.append(record.version)
        self._undo(record.next_step)
        self._lose(record.lost)
        self.unknown |= set(record.unknown)
        self._lose([group_id for step in record.unknown for group_id in self.steps.pop(step, ())])
        if (ledger := record.ledger) is not None:  # it may know more than a journal whose tail was lost
            settled = [i for i in self.state if ledger.settles(i)]
            self._set((i for i in settled if self.state[i] != "consumed"), "committed")
            if unknown := ledger.quarantined.items() - self.quarantined.keys():
                uses = self.uses()
                for group_id, attempt in unknown:
                    own = uses.get(group_id, ())
                    self.quarantined[group_id, attempt] = own[-1] if len(own) > 1 else 0

    def _undo(self, first: int) -> None:
        """The steps from `first` on are consumed again, if at all."""
        self.unknown = {step for step in self.unknown if step < first}
        undone = [step for step in self.steps if step >= first]
        if not undone:
            return
        taken = {group_id for step in undone for group_id in self.steps.pop(step)}
        left = {group_id for step in self._others() for group_id in self.steps[step]}
        self._set(taken - left, "completed")
        for group_id, attempt in self.quarantined:
            if group_id in taken - left:
                self.quarantined[group_id, attempt] = 0  # whichever step is its first

    def _others(self) -> Iterable[int]:
        """The steps that are left and may have groups of others; none where no group is trained again."""
        return self.steps if any(self.reused.values()) else ()

    def _lose(self, group_ids: Iterable[int]) -> None:
        """Of those that no step has any more, the frames are generated again."""
        left = {group_id for step in self._others() for group_id in self.steps[step]}
        self._set((group_id for group_id in group_ids if group_id not in left), "waiting")

    def _set(self, group_ids: Iterable[int], state: str) -> None:
        self.state |= dict.fromkeys(group_ids, state)


def read_journal(folder: Path) -> Iterator[Entry]:
    """Every readable record in the order of writing, from all segments; may be used while the run goes on.

    What cannot be read is named in the log; the rest of its segment is left out.
    """
    for number, path in segments(folder):
        try:
            for entry in scan(number, path):
                if isinstance(entry, Entry):
                    yield entry
                else:
                    log.warning("%s is left out: %s", folder, entry)
        except FileNotFoundError:  # compacted since the folder was listed
            continue


def recorded_batches(folder: Path) -> Iterator[Batch]:
    """The batches of the surviving history, decoded, in the order of their steps.

    A step that was consumed again replaces what it was before and all later ones; a step that was only delivered
    again has no second record. Where old segments were compacted away the history begins with the first step whose
    groups are all there. Two passes: the first notes where the groups are, the second reads one batch at a time,
    so that memory holds one batch. Raises JournalDamaged for a step or a group that is missing, or a step that may
    have trained others than its record names, AnotherRun for segments of several runs.
    """
    contents, runs = Contents(), set[str | None]()
    places: dict[int, tuple[Place, tuple[int, int]]] = {}
    for entry in read_journal(folder):
        if isinstance(entry.record, Opening):
            runs.add(entry.record.run)
            continue
        contents.add(entry.record)
        if isinstance(entry.record, Completed):
            places[entry.record.group_id] = entry.place, (entry.record.group_id, entry.record.attempt)
    if len(runs - {None}) > 1:
        raise AnotherRun(f"{folder} has segments of the runs {', '.join(sorted(filter(None, runs)))}; allowed: of one")
    steps = contents.steps
    first = min((version.step for version in contents.began), default=0)
    due = None if is_compacted(folder) else first
    gone = _left_behind(folder) - places.keys()
    begins = max((step + 1 for step, ids in steps.items() if not gone.isdisjoint(ids)), default=0)
    for step, ids in sorted((steps | dict.fromkeys(contents.unknown, ())).items()):
        if step in contents.unknown and step >= begins:
            raise JournalDamaged(f"{folder}: the record of what step {step} trained is missing, or of a step behind it")
        missing = [group_id for group_id in ids if group_id not in places]
        if step < begins or (missing and due is None):
            continue
        if missing:
            raise JournalDamaged(f"{folder}: step {step} without its groups {missing}")
        if due is not None and step != due:
            raise JournalDamaged(f"{folder}: the record of step {due} is missing, step {step} is the next")
        groups = tuple(decode_group(*load_frames(folder, *places[group_id])) for group_id in ids)
        out = {group.group_id for group in groups if contents.is_out(step, group.group_id, group.attempt)}
        groups = tuple(group.emptied if group.group_id in out else group for group in groups)
        yield Batch(step=step, groups=groups, quarantined=frozenset(out), reused=frozenset(contents.reused[step]))
        due = step + 1


def _left_behind(folder: Path) -> frozenset[int]:
    """Groups that were complete when the first kept segment began, in segments that were deleted."""
    for number, path in segments(folder)[:1]:
        first = next(scan(number, path), None)
        if isinstance(first, Entry) and isinstance(first.record, Opening):
            try:
                snapshot = msgspec.msgpack.decode(load_frames(folder, first.place)[0], type=Snapshot)
            except (JournalDamaged, msgspec.DecodeError):
                break
            places = ((slot.group_id, slot.place) for slot in snapshot.slots)
            return frozenset(group_id for group_id, place in places if place is not None and place.segment < number)
    return frozenset()


def was_compacted(folder: Path) -> bool:
    """Segments were deleted at the beginning of the journal as `journal.keep` says, and were not lost.

    A segment names the setting under which it was written. One that deletes leaves two of them, under any later one.
    """
    if not is_compacted(folder):
        return False
    first = (next(scan(number, path), None) for number, path in segments(folder))
    openings = [each.record for each in first if isinstance(each, Entry) and isinstance(each.record, Opening)]
    return any(opening.keep != "all" for opening in openings)


def is_compacted(folder: Path) -> bool:
    """Segments are not there at the beginning of the journal."""
    return any(number > 0 for number, _ in segments(folder)[:1])

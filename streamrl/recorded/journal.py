"""What a run's journal has recorded: its segments, each attempt at a group and what became of it, and the batches.

Usage:
    journal = RunJournal(Path("runs/quickstart"))
    journal.groups[64].state, journal.groups[64].step  # ('committed', 2)
    journal.load(journal.groups[64]).samples[0].reward  # 1.0
    [batch.step for batch in batches(Path("runs/quickstart"))]  # [0, 1, 2, ...]

It may be read while the run goes on: an object is the journal as it was when the object was made.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.observe.bars import Report, silent
from streamrl.replay.history import STATES, Contents, is_compacted, recorded_batches, was_compacted
from streamrl.replay.records import AnyRecord, Completed, Dropped, Issued, Place
from streamrl.replay.segments import Entry, JournalDamaged, Opening, Unreadable, load_frames, scan, segments
from streamrl.stream.codec import decode_group
from streamrl.types import Batch, Group, PolicyVersion

__all__ = [
    "STATES", "JournalDamaged", "RecordedGroup", "RunJournal", "Segment", "Unreadable", "batches", "has_begin",
    "has_deleted", "has_journal",
]  # fmt: skip

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """One attempt at a group that was accepted, and what became of it."""

    group_id: int
    attempt: int
    state: str  # completed, consumed, committed, quarantined, dropped, or replaced by a later attempt
    reason: str | None  # why it was dropped
    steps: tuple[int, ...]  # that consumed it, ascending: at most `replay.reuse`
    positions: tuple[int, ...]  # in the batches of these steps, from 0
    tokens: int  # generated
    answers: int  # samples that are no placeholders
    pass_rate: float  # share of right ones among them
    place: Place  # of its record in the journal

    @property
    def step(self) -> int | None:
        """The first step that consumed it."""
        return self.steps[0] if self.steps else None

    @property
    def position(self) -> int | None:
        """In the batch of that step, from 0: mini batches are cut in this order."""
        return self.positions[0] if self.positions else None


@dataclass(slots=True)
class Segment:
    """One file of the journal."""

    number: int
    size: int  # bytes
    begun: float = float("nan")  # seconds since the epoch; not a number where the first record cannot be read
    records: int = 0
    groups: int = 0
    frame_bytes: int = 0
    problems: list[Unreadable] = field(default_factory=list)


class RunJournal:
    """The journal of a run."""

    def __init__(self, run_folder: Path, *, verify: bool = False, report: Report = silent) -> None:
        """Read every record; `verify`: the frames too. What cannot be read is in the segments' `problems`.

        `report`: MB that are read, of all.
        """
        self.folder = run_folder / "journal"
        self._report = report
        self._contents = Contents()
        self._found: list[tuple[Completed, Place]] = []
        # Where a group's last record is, unless it was dropped, or is generated again. Attempts begin at 0 again where
        # a learner starts from older steps than the journal can go on from.
        self._valid: dict[int, Place] = {}
        self._dropped: dict[Place, str] = {}  # why
        self.segments: list[Segment] = []
        found = list(_sizes(segments(self.folder)))
        self._total = sum(size for _, _, size in found)  # bytes
        for number, path, size in found:
            with suppress(FileNotFoundError):  # compacted since the folder was listed
                self.segments.append(self._survey(number, path, size, verify))
        used = self._contents.uses(), self._contents.positions()
        self.groups = [self._recorded(record, place, *used) for record, place in self._found]  # as they came

    @property
    def states(self) -> Counter[str]:
        """How many groups are in each of STATES."""
        return Counter(self._contents.state.values())

    @property
    def tickets(self) -> int:
        """Attempts that were issued."""
        return self._contents.tickets

    @property
    def dropped(self) -> int:
        """Attempts that a filter took out."""
        return len(self._contents.dropped)

    @property
    def quarantined(self) -> int:
        """Attempts that were consumed and not trained."""
        return len(self._contents.quarantined)

    @property
    def uses(self) -> int:
        """Places of all recorded batches."""
        return sum(map(len, self._contents.steps.values()))

    @property
    def reused(self) -> int:
        """Those of them whose group an earlier step had (`replay.reuse`)."""
        return sum(len(self._contents.reused[step]) for step in self._contents.steps)

    @property
    def steps(self) -> list[int]:
        """The learner steps whose batches are recorded, ascending."""
        return sorted(self._contents.steps)

    @property
    def began(self) -> list[PolicyVersion]:
        """The versions at which learners started."""
        return self._contents.began

    def load(self, group: RecordedGroup) -> Group:
        """The whole group. Raises ValueError where its frames are damaged, deleted, or of another version."""
        return decode_group(*load_frames(self.folder, group.place))

    def warn(self) -> None:
        """A line in the log for each segment that cannot be read to its end."""
        for segment in self.segments:
            for problem in segment.problems:
                log.warning("%s is left out: %s", self.folder, problem)

    def _survey(self, number: int, path: Path, size: int, verify: bool) -> Segment:
        segment, before = Segment(number, size), sum(segment.size for segment in self.segments)
        for entry in scan(number, path):
            if isinstance(entry, Unreadable):
                segment.problems.append(entry)
                continue
            segment.records += 1
            segment.frame_bytes += entry.frame_bytes
            if isinstance(entry.record, Opening):
                segment.begun = entry.record.time
            else:
                self._add(entry.record, entry.place)
            if isinstance(entry.record, Completed):
                segment.groups += 1
            if verify and (problem := self._problem(entry, segment.size)):
                segment.problems.append(problem)
            self._report((before + entry.end) / 1e6, self._total / 1e6)
        return segment

    def _add(self, record: AnyRecord, place: Place) -> None:
        """One record, in the order of writing."""
        self._contents.add(record)
        match record:
            case Completed(group_id=group_id):
                self._found.append((record, place))
                self._valid[group_id] = place
            case Issued(ticket=ticket):
                self._valid.pop(ticket.group_id, None)
            case Dropped(group_id=group_id, reason=reason):
                if (completed := self._valid.pop(group_id, None)) is not None:
                    self._dropped[completed] = reason

    def _problem(self, entry: Entry, size: int) -> Unreadable | None:
        """What is wrong with the frames of a record."""
        try:
            load_frames(self.folder, entry.place)
        except JournalDamaged as error:
            return Unreadable(entry.place, entry.end - entry.place.offset, str(error), torn=entry.end >= size)
        return None

    def _recorded(
        self, record: Completed, place: Place, uses: dict[int, tuple[int, ...]], positions: dict[int, tuple[int, ...]]
    ) -> RecordedGroup:
        state, reason = self._state(record, place)
        used = state in ("consumed", "committed", "quarantined")
        return RecordedGroup(
            group_id=record.group_id,
            attempt=record.attempt,
            state=state,
            reason=reason,
            steps=uses.get(record.group_id, ()) if used else (),
            positions=positions.get(record.group_id, ()) if used else (),
            tokens=record.tokens,
            answers=record.answers,
            pass_rate=record.pass_rate,
            place=place,
        )

    def _state(self, record: Completed, place: Place) -> tuple[str, str | None]:
        if (reason := self._dropped.get(place)) is not None:
            return "dropped", reason
        state = self._contents.state[record.group_id]
        if self._valid.get(record.group_id) != place or state == "waiting":
            return "replaced", None
        return ("quarantined" if (record.group_id, record.attempt) in self._contents.quarantined else state), None


def has_journal(run_folder: Path) -> bool:
    """Whether the run has a segment."""
    return bool(segments(run_folder / "journal"))


def has_begin(run_folder: Path) -> bool:
    """Whether the journal goes back to the run's first step."""
    return not is_compacted(run_folder / "journal")


def has_deleted(run_folder: Path) -> bool:
    """Whether a `journal.keep` that the run has, or had, has deleted what the journal lacks at its beginning."""
    return was_compacted(run_folder / "journal")


def batches(run_folder: Path) -> Iterator[Batch]:
    """The batches of the surviving history, decoded one at a time, in the order of their steps.

    Raises JournalDamaged for a step or a group that is missing, AnotherRun for segments of several runs.
    """
    return recorded_batches(run_folder / "journal")


def _sizes(found: Iterable[tuple[int, Path]]) -> Iterator[tuple[int, Path, int]]:
    """(number, path, bytes) of the segments that are still there."""
    for number, path in found:
        with suppress(FileNotFoundError):
            yield number, path, path.stat().st_size

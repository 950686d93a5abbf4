"""What each role did at every instant of a run, from the event logs. Pure: it is fed records, and answers.

    events/ROLE-N.jsonl ──feed──▶ a Track for each role ──phases──▶ [start][generate][pause][generate][wait]...

The phases of a role follow one another without gap or overlap, from its process's start to its end. Where spans
overlap, the order in the role's `Kind` decides what the instant counts as. What nobody recorded is the kind's `rest`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.observe.events import event_files, read_events
from streamrl.observe.intervals import Interval, clip, subtract, union
from streamrl.observe.starting import STARTING

# The phase of a process that is not ready yet.
START = "start"

# The learner's second thread; a track of its own, though its records are in the learner's file.
PUBLISHER = "publisher"


@dataclass(frozen=True, slots=True)
class Kind:
    """How the records of one kind of role become phases."""

    spans: dict[str, str]  # name of the span -> phase
    order: tuple[str, ...]  # of phases that overlap the first one counts
    rest: str  # the phase in which nothing of that goes on


# The parts of a step come in one record at its end; "train" is what none of them covers.
STEP = ("scores", "critic", "forward", "backward", "optimizer", "train")

KINDS = {
    "learner": Kind(
        spans={
            "learner.wait": "wait",
            "learner.step": "train",
            "learner.offer": "publish",
            "learner.save": "save",
            "learner.export": "export",
            "learner.evaluate": "evaluate",
        },
        order=("save", "export", "evaluate", "publish", "wait", *STEP),
        rest="other",
    ),
    "publisher": Kind(spans={"publish": "send", "publish.keep": "keep"}, order=("send", "keep"), rest="idle"),
    "generator": Kind(
        spans={"group": "generate", "publish.apply": "pause", "evaluate": "evaluate"},
        order=("pause", "generate", "evaluate"),
        rest="wait",
    ),
    "reward-model": Kind(spans={"reward_model.batch": "score"}, order=("score",), rest="idle"),
}

# Phases in which a role has nothing to do.
WAITING = frozenset({"wait", "idle"})


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a role's time. Example: `Phase("forward", 12.5, 13.0)`."""

    name: str
    begin: float  # seconds since the epoch
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """One group from its ticket's arrival at the worker to its last reward."""

    group_id: int
    attempt: int
    begin: float  # seconds since the epoch
    end: float
    tokens: int  # output tokens


@dataclass(slots=True)
class _Spans:
    """Spans of one phase: those that ended, as a set, and the open ones."""

    closed: list[Interval] = field(default_factory=list)
    open: set[str] = field(default_factory=set)
    since: float = 0.0  # begin of the present stretch, where enough are open

    def begin(self, span: str, time: float, needed: int) -> None:
        self.open.add(span)
        if len(self.open) == needed:
            self.since = time

    def end(self, span: str, time: float, needed: int) -> None:
        if span not in self.open:  # its begin is in no record that is left
            return
        if len(self.open) == needed:
            self.closed.append((self.since, time))
        self.open.discard(span)

    def cut(self, time: float, needed: int) -> None:
        """Its process is gone: what was open ended there."""
        if len(self.open) >= needed:
            self.closed.append((self.since, time))
        self.open.clear()


class Track:
    """One role through all its processes.

    Usage:
        track = Track("generator-0")
        for record in read_events(path):
            track.feed(record)
        track.phases(begin, end)
    """

    def __init__(self, role: str) -> None:
        self.role = role
        self.groups: list[GroupSpan] = []  # those that ended, in the order of their ends
        self.last = 0.0  # time of the newest record
        self._kind = KINDS[kind_of(role)]
        self._spans: dict[str, _Spans] = {}
        self._alive: list[Interval] = []
        self._starts: list[Interval] = []
        self._born: float | None = None
        self._ready = False
        self._servers: set[str] = set()  # that were paused once
        self._announced = 0  # servers that its process began with
        self._groups: dict[str, float] = {}  # begin of the open ones, by span

    def feed(self, record: dict[str, Any]) -> None:
        """Take the next record of this role, in the order of its file."""
        event, time = record["event"], record["time"]
        if event == "process.start":
            self._cut(self.last)
            self._born, self._ready = time, False
        self.last = max(self.last, time)
        if event == "process.end":
            self._cut(time)
        elif event == "ready" and self._born is not None and not self._ready:
            self._ready = True
            self._starts.append((self._born, time))
            self._announced = len(record.get("servers") or ())
        elif event == "learner.phases":
            for name, begin, end in record["phases"]:
                self._of(name).closed.append((begin, end))
        elif phase := self._kind.spans.get(event):
            self._feed_span(phase, record)

    @property
    def begin(self) -> float:
        """When its first process started; `math.inf` where no record says so."""
        born = math.inf if self._born is None else self._born
        return min(self._alive[0][0] if self._alive else math.inf, born)

    @property
    def is_alive(self) -> bool:
        """Its newest process has not ended, as far as the records go."""
        return self._born is not None

    def settled(self, now: float) -> float:
        """The instant up to which later records change nothing: a step tells of its parts when it ends."""
        training = self._spans.get("train")
        return training.since if training and training.open else now

    def phases(self, begin: float, end: float) -> list[Phase]:
        """The phases between two instants, in order; none where no process lived.

        What is still going on goes on until `end`: do not ask for more of a run that is over than its records tell.
        """
        lives = union(clip(self._living(end), begin, end))
        painted: list[Interval] = []
        phases: list[Phase] = []
        for name in (*self._kind.order, START, self._kind.rest):
            intervals = lives if name == self._kind.rest else self._intervals(name, begin, end)
            fresh = subtract(_both(union(intervals), lives), painted)
            phases += [Phase(name, *interval) for interval in fresh]
            painted = union([*painted, *fresh])
        return sorted(phases, key=lambda phase: phase.begin)

    def seconds(self, begin: float, end: float) -> dict[str, float]:
        """Seconds of each phase between two instants."""
        sums: dict[str, float] = {}
        for phase in self.phases(begin, end):
            sums[phase.name] = sums.get(phase.name, 0.0) + phase.seconds
        return sums

    def forget(self, before: float) -> None:
        """Drop what ended before an instant: nobody asks for it any more."""
        self.groups = [group for group in self.groups if group.end >= before]
        self._alive, self._starts = (clip(some, before, math.inf) for some in (self._alive, self._starts))
        for spans in self._spans.values():
            spans.closed = [interval for interval in spans.closed if interval[1] >= before]

    def _feed_span(self, phase: str, record: dict[str, Any]) -> None:
        span, time, spans = record.get("span", ""), record["time"], self._of(phase)
        if "server" in record:
            self._servers.add(record["server"])
        if record.get("phase") == "begin":
            spans.begin(span, time, self._needed(phase))
            if phase == "generate":
                self._groups[span] = time
            return
        spans.end(span, time, self._needed(phase))
        if phase == "generate" and (begun := self._groups.pop(span, None)) is not None:
            group_id, attempt = record.get("group_id", -1), record.get("attempt", 0)
            self.groups.append(GroupSpan(group_id, attempt, begun, time, record.get("tokens") or 0))

    def _needed(self, phase: str) -> int:
        """Open spans that make the phase: a worker is paused when all its servers are."""
        return max(1, self._announced, len(self._servers)) if phase == "pause" else 1

    def _of(self, phase: str) -> _Spans:
        return self._spans.setdefault(phase, _Spans())

    def _cut(self, time: float) -> None:
        """The process is gone since `time`."""
        if self._born is None:
            return
        self._alive.append((self._born, time))
        if not self._ready:
            self._starts.append((self._born, time))
        for phase, spans in self._spans.items():
            spans.cut(time, self._needed(phase))
        self._groups.clear()
        self._born = None

    def _living(self, end: float) -> Iterator[Interval]:
        yield from self._alive
        if self._born is not None:
            yield self._born, end

    def _intervals(self, name: str, begin: float, end: float) -> list[Interval]:
        if name == START:
            unready = [] if self._born is None or self._ready else [(self._born, end)]
            return clip([*self._starts, *unready], begin, end)
        if name not in self._spans:
            return []
        spans = self._spans[name]
        going_on = [(spans.since, end)] if len(spans.open) >= self._needed(name) else []
        return clip([*spans.closed, *going_on], begin, end)


@dataclass(slots=True)
class Timeline:
    """The tracks of a run, by role. Example: `Timeline.read(run_folder).tracks["learner-0"]`."""

    tracks: dict[str, Track] = field(default_factory=dict)

    @classmethod
    def read(cls, run_folder: Path) -> Timeline:
        """The timeline of everything that a run has recorded."""
        timeline = cls()
        for path in event_files(run_folder):
            for record in read_events(path):
                timeline.feed(record)
        return timeline

    def feed(self, record: dict[str, Any]) -> None:
        """Take a record of any role; each role's in the order of its file."""
        role = record["role"]
        if (kind := kind_of(role)) not in KINDS or record["event"] == STARTING:
            return  # a learner begins its part before it knows that there is something to do
        self._track(role).feed(record)
        is_thread = record["event"] in KINDS["publisher"].spans or record["event"].startswith(("process.", "ready"))
        if kind == "learner" and is_thread:
            self._track(PUBLISHER).feed(record)

    @property
    def generators(self) -> list[Track]:
        return [self.tracks[role] for role in sorted(self.tracks) if kind_of(role) == "generator"]

    @property
    def learner(self) -> Track | None:
        return self.tracks.get("learner-0")

    @property
    def begin(self) -> float:
        """When the first process started."""
        return min((track.begin for track in self.tracks.values()), default=0.0)

    @property
    def end(self) -> float:
        """Time of the newest record."""
        return max((track.last for track in self.tracks.values()), default=0.0)

    def seconds(self, begin: float, end: float) -> Iterator[tuple[float, dict[str, str]]]:
        """For every second from `begin` on: its begin, and what each role did for most of it."""
        count = max(0, math.ceil(end - begin))
        rows: list[dict[str, dict[str, float]]] = [{} for _ in range(count)]
        for role, track in sorted(self.tracks.items()):
            for phase in track.phases(begin, end):
                for index, seconds in slices(phase.begin - begin, phase.end - begin):
                    rows[index].setdefault(role, defaultdict(float))[phase.name] += seconds
        for index, row in enumerate(rows):
            yield begin + index, {role: max(sums, key=sums.__getitem__) for role, sums in row.items()}

    def _track(self, role: str) -> Track:
        if role not in self.tracks:
            self.tracks[role] = Track(role)
        return self.tracks[role]


def kind_of(role: str) -> str:
    """`generator` of `generator-3`."""
    return role.rpartition("-")[0] or role


def slices(begin: float, end: float) -> Iterator[tuple[int, float]]:
    """(second, part of it) of the whole seconds that an interval from 0 on touches.

    >>> list(slices(0.5, 2.25))
    [(0, 0.5), (1, 1), (2, 0.25)]
    """
    for index in range(math.floor(begin), math.ceil(end)):
        if (part := min(end, index + 1) - max(begin, index)) > 0:
            yield index, part


def _both(some: Iterable[Interval], others: list[Interval]) -> list[Interval]:
    """The instants that two sets share."""
    some = list(some)
    return subtract(some, subtract(some, others))

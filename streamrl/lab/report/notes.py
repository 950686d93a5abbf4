"""The events of note of a run: starts, restarts, failures, what was lost and reported. Pure: it is fed records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Grade = Literal["plain", "good", "warning", "bad"]

EVENTS: dict[str, tuple[Grade, str]] = {
    "gave_up": ("bad", "gave up: {reason}"),
    "worker.failed": ("bad", "worker failed: {reason}"),
    "worker.silent": ("warning", "{worker} was silent"),
    "worker.gone": ("plain", "{worker} left, {tickets} tickets back"),
    "worker.replaced": ("warning", "{worker} came again, {tickets} tickets back"),
    "worker.undrained": ("warning", "ended with {tickets} tickets at work"),
    "server.lost": ("bad", "{server} was lost"),
    "server.restarted": ("warning", "{server} was started again"),
    "publish.failed": ("bad", "{server} did not take version {version}: {reason}"),
    "publish.waited": ("plain", "a publish waited {seconds} s: {reason}"),
    "evaluated": ("good", "version {version} was evaluated"),
    "scorer.failed": ("bad", "the scorer of {task} failed: {reason}"),
    "group.refused": ("bad", "group {group_id} was refused: {reason}"),
    "group.too_large": ("bad", "group {group_id} was too large: {reason}"),
    "group.placeholders": ("warning", "group {group_id} was given up"),
    "ticket.expired": ("warning", "ticket of group {group_id} expired"),
    "checkpoint.damaged": ("bad", "{told}"),
    "journal.damage": ("bad", "{told}"),
    "journal.recovered": ("warning", "the buffer came back from its journal at step {step}"),
    "journal.full": ("bad", "the journal cannot grow: {reason}"),
    "journal.room": ("plain", "the journal has room again"),
    "bound.moved": ("plain", "the bound moved from {former} to {staleness}: {reason}"),
    "learner.saved": ("plain", "checkpoint of version {version}"),
    "learner.finished": ("good", "the learner finished with version {version}"),
    "learner.stopped": ("plain", "{reason}"),
    "learner.exited": ("plain", "the run ended at version {version}, to be gone on with: {reason}"),
    "learner.quarantined": ("bad", "group {group_id} of step {step} cannot be trained: {reason}"),
    "learner.unreachable": ("warning", "the learner could not be reached at step {step}"),
    "replay.missed": ("bad", "{messages} messages of {peer} were missed"),
    "replay.malformed": ("bad", "a malformed message of {peer}: {reason}"),
    "replay.refused": ("bad", "{peer} {name} was refused: {reason}"),
    "replay.stop": ("plain", "{reason}"),
}
"""Event: its grade, and what the page says, in terms of the event's fields. Others are not of note, unless they
have an `error`, or say why they `failed`."""

SINGLE = frozenset({"bound.moved"})
"""Events of which each is a note of its own, by its step."""


@dataclass(slots=True)
class Note:
    """One line of the page: an event, or several of one kind."""

    event: str
    time: float  # of the first one, seconds since the epoch
    role: str
    grade: Grade
    text: str
    last: float = 0.0  # of the last one
    count: int = 1

    @property
    def is_mark(self) -> bool:
        """Worth a line in the curves."""
        return self.event == "process.again"

    def describe(self, begin: float) -> dict[str, Any]:
        """As JSON; times in seconds since the run's begin."""
        return {
            "at": round(self.time - begin, 3),
            "until": round(self.last - begin, 3),
            "count": self.count,
            "role": self.role,
            "grade": self.grade,
            "text": self.text,
            "mark": self.is_mark,
        }


class Notes:
    """Takes the records of each role in the order of its file. Events of one kind and role become one note."""

    def __init__(self) -> None:
        self.stop: dict[str, Any] | None = None  # the service's last word, if nothing started after it
        self.begin: float | None = None  # time of the first record
        self._notes: dict[tuple[Any, ...], Note] = {}
        self._processes: dict[str, int] = {}  # role: how many so far
        self._ended: dict[str, bool] = {}  # role: its newest process said so

    def feed(self, record: dict[str, Any]) -> None:
        """Take the next record of a role."""
        event, role = record["event"], record["role"]
        self.begin = record["time"] if self.begin is None else min(self.begin, record["time"])
        if event == "process.start":
            self._start(record)
        elif event == "process.end":
            self._ended[role] = True
        elif event in EVENTS:
            grade, text = EVENTS[event]
            if event == "learner.stopped" or (event == "learner.finished" and "reason" in record):
                self.stop = record  # of a run of `streamrl sft`, which has no service
            if event == "replay.stop":
                self.stop = record
                grade = "good" if record.get("code") == 0 else "bad"
            each = (record.get("step"),) if event in SINGLE else ()
            self._add(record, event, grade, text.format_map(_Fields(record)), *each)
        elif record.get("phase") == "end" and "error" in record:
            self._fail(record)
        elif record.get("phase") == "end" and "failed" in record:
            self._add(record, event, "warning", f"{event}: {record['failed']}")

    def in_order(self) -> list[Note]:
        """The notes by the time of their first event."""
        return sorted(self._notes.values(), key=lambda note: note.time)

    def _start(self, record: dict[str, Any]) -> None:
        role = record["role"]
        number = self._processes[role] = self._processes.get(role, 0) + 1
        ended = self._ended.get(role, True)
        self._ended[role] = False
        if role.startswith("replay") or (self.stop is not None and self.stop["role"] == role):
            self.stop = None
        if number == 1:
            self._add(record, "process.start", "plain", "started")
        else:
            text = f"started again (process {number})" + ("" if ended else "; the one before had no last word")
            self._add(record, "process.again", "warning" if ended else "bad", text, number)

    def _fail(self, record: dict[str, Any]) -> None:
        """A span that ended by an exception; one that was cancelled was only cut off."""
        event, error = record["event"], str(record["error"])
        if error.startswith("CancelledError"):
            self._add(record, event, "plain", f"{event} was cut off")
        else:
            self._add(record, event, "bad", f"{event}: {error}")

    def _add(self, record: dict[str, Any], event: str, grade: Grade, text: str, *more: Any) -> None:
        """A new note, or one more of a kind that is there."""
        key = (event, record["role"], record.get("worker"), record.get("server"), *more)
        if (note := self._notes.get(key)) is None:
            note = self._notes[key] = Note(event, record["time"], record["role"], grade, text)
        else:
            note.count += 1
            note.text = text
        note.last = record["time"]


class _Fields(dict[str, Any]):
    """Fields of an event; one that an older log does not have is a question mark."""

    def __missing__(self, name: str) -> str:
        return "?"

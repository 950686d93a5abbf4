"""Where the time goes in a run that goes on: a timeline that grows, and what the last seconds say.

events/*.jsonl ──┐
                 ├─ read ─▶ Live ─▶ the lines of the console, `streamrl top`, the Prometheus endpoint
metrics.jsonl ───┘
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from streamrl.observe.hints import Hint, Hints
from streamrl.observe.roofline import Holder, Roofline, held_up, roofline
from streamrl.observe.run_clock import RunClock
from streamrl.observe.tail import Records, Rows
from streamrl.observe.timeline import START, Timeline

# Seconds that the live lines are about: some steps of a small run.
WINDOW = 30.0

# Rows that a roofline is made of at least, though they be older than the window: one long step alone says little.
FEWEST_STEPS = 3

# Events of note that are kept.
_NOTED = 200

# What every healthy run says again and again; anything else is of note.
_ORDINARY = frozenset(
    {
        "process.start", "process.end", "starting", "ready", "probe", "group", "batch", "tickets", "group.accepted",
        "learner.wait", "learner.step", "learner.offer", "learner.save", "learner.ranks", "learner.phases",
        "learner.taken_off",
        "learner.export", "learner.progress", "learner.saved", "publish", "publish.keep", "publish.apply",
        "publish.announced", "publish.acknowledged", "replay.hello", "concurrency", "devices", "evaluate", "evaluated",
        "evaluated.late",
        "mismatch", "mismatch.measured", "reward_model.batch", "journal.compacted", "groups.forgotten",
        "learner.finished", "learner.stopped", "learner.evaluate", "learner.peak", "publish.complete", "replay.end",
        "sink",
    }
)  # fmt: skip


@dataclass(slots=True)
class Glance:
    """What a run did lately. Seconds of `doing` are the window's at most."""

    begin: float = 0.0  # seconds since the epoch
    end: float = 0.0
    doing: dict[str, dict[str, float]] = field(default_factory=dict)  # role -> phase -> seconds
    held_up: dict[Holder, float] = field(default_factory=dict)  # holder -> seconds
    roofline: Roofline | None = None
    hints: list[Hint] = field(default_factory=list)  # that go on
    places: dict[str, str] = field(default_factory=dict)  # sink: where it shows what it was given

    @property
    def bottleneck(self) -> Holder:
        """Who held up most of the window."""
        return max(self.held_up, key=lambda holder: self.held_up[holder], default="start")


class Live:
    """Follows a run folder.

    Usage:
        live = Live(run_folder)
        live.read()  # now and then
        live.glance().bottleneck
    """

    def __init__(self, run_folder: Path, window: float = WINDOW, clock: RunClock | None = None) -> None:
        """`window`: seconds that a glance is about; `math.inf` for the whole run. `clock`: the run's; None: ours."""
        self.clock = clock or RunClock(is_ours=True)
        self.heard = monotonic()  # when something new was read last, on this host's monotonic clock
        self.stop: dict[str, Any] | None = None  # the last word of the service, or of a lone learner
        self.timeline = Timeline()
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)  # of (role, phase), since the run's start
        self.notes: deque[dict[str, Any]] = deque(maxlen=_NOTED)  # events of note, newest last
        self.hints = Hints()
        self.places: dict[str, str] = {}  # sink: where it shows what it was given
        self._records = Records(run_folder)
        self._rows = Rows(run_folder)
        self._counted: dict[str, float] = {}  # role -> instant up to which `seconds` counts
        self._taken = 0  # records
        self._service_ended: bool | None = None  # None: it recorded nothing
        self._merged: tuple[tuple[int, ...], int] = (), 0  # which file `events.jsonl` was, and its lines
        self._folder = run_folder
        self._window = window

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metrics of all steps so far."""
        return self._rows.all

    def read(self, time: float | None = None) -> None:
        """Take in what was written until `time`, which is the present; of the timeline keep what a glance needs."""
        for record in self._records.read():
            self._feed(record)
        self.read_rows()
        time = self.clock.now() if time is None else time
        if not self.is_alive:
            time = min(time, self.timeline.end)  # the time of a run that is over stops at its end
        self._count(time)
        oldest = min(self._recent(time)[0], time - 2 * self._window)
        for track in self.timeline.tracks.values():
            track.forget(min(oldest, self._counted.get(track.role, oldest)))

    def read_rows(self) -> None:
        """Take in the metrics alone, which is cheap."""
        self._rows.read()
        self.hints.follow(self.rows)

    def glance(self, time: float | None = None) -> Glance:
        """What was done in the window before `time`, and how fast the steps within it were."""
        time = self.clock.now() if time is None else time
        if not self.timeline.tracks:
            return Glance(hints=self.hints.active)
        if not self.is_alive:
            time = min(time, self.timeline.end)
        begin = max(time - self._window, self.timeline.begin)
        _, rows = self._recent(time)
        if math.isinf(self._window) and rows:  # of a whole run: its steps, without its start
            begin, time = rows[0]["time"], rows[-1]["time"]
        doing = {role: track.seconds(begin, time) for role, track in sorted(self.timeline.tracks.items())}
        held, limits = held_up(self.timeline, begin, time), roofline(self.timeline, rows)
        return Glance(begin, time, doing, held, limits, self.hints.active, dict(self.places))

    @property
    def is_alive(self) -> bool:
        """Whether some process of the run that does work has not ended."""
        return bool(self.timeline.tracks) and not self.is_over

    @property
    def is_over(self) -> bool:
        """All processes have ended. One that was killed does not say so: its supervisor does, or the others' end.

        No clock decides: file systems and hosts have their own.
        """
        if not self._taken:
            return False
        if self._is_merged():
            return True
        living = [role for role, track in self.timeline.tracks.items() if track.is_alive]
        if not living and self._service_ended is None:
            return bool(self.timeline.tracks)
        return bool(self._service_ended) and "learner-0" not in living

    def _is_merged(self) -> bool:
        """The supervisor has merged all that was recorded, which it does when all have ended."""
        try:
            status = (self._folder / "events.jsonl").stat()
        except FileNotFoundError:
            return False
        file = status.st_ino, status.st_size, status.st_mtime_ns
        if file != self._merged[0]:
            with (self._folder / "events.jsonl").open("rb") as merged:
                self._merged = file, sum(1 for _ in merged)
        return self._merged[1] >= self._taken

    def _feed(self, record: dict[str, Any]) -> None:
        self._taken += 1
        self.heard = monotonic()
        self.clock.heard(record["time"], record["role"], begins=record["event"] == "process.start")
        self.timeline.feed(record)
        if record["event"] == "sink":
            self.places[record["name"]] = record["where"]
        if record["event"] not in _ORDINARY or not record.keys().isdisjoint(("error", "failed")):
            self.notes.append(record)
        if record["role"].startswith("learner"):  # what a run of `streamrl sft` says, which has no service
            if record["event"] in ("learner.finished", "learner.stopped"):
                self.stop = record
            elif record["event"] == "process.start" and self.stop is not None and self.stop["role"] == record["role"]:
                self.stop = None
        if record["role"].startswith("replay"):
            if record["event"] == "process.start":
                self.stop, self._service_ended = None, False
            elif record["event"] == "process.end":
                self._service_ended = True
            elif record["event"] == "replay.stop":
                self.stop = record

    def _recent(self, time: float) -> tuple[float, list[dict[str, Any]]]:
        """The rows that a roofline is about, and the end of the first of them."""
        last = [row for row in self.rows if "time" in row]
        recent = [row for row in last if row["time"] >= time - self._window]
        rows = recent if len(recent) >= FEWEST_STEPS else last[-FEWEST_STEPS:]
        return (rows[0]["time"] if rows else time), rows

    def _count(self, time: float) -> None:
        """Add to `seconds` what is certain by now: a phase that ended is never counted otherwise later."""
        alive = self.is_alive
        for role, track in self.timeline.tracks.items():
            begin = self._counted.get(role, track.begin)
            end = track.settled(time if alive and track.is_alive else track.last)
            if end <= begin:
                continue
            for phase, seconds in track.seconds(begin, end).items():
                self.seconds[role, phase] += seconds
            self._counted[role] = end


def sentence(glance: Glance) -> str:
    """Where the time goes, as one line.

    Example: `learner wait 62%, backward 20%, forward 12%; generators generate 97%, pause 3%`.
    """
    names = ("learner", "generators", "reward models")
    sides: dict[str, dict[str, float]] = {name: defaultdict(float) for name in names}
    for role, phases in glance.doing.items():
        side = "generators" if role.startswith("generator-") else role.removesuffix("-0")
        side = "reward models" if role.startswith("reward-model-") else side
        for phase, seconds in phases.items() if side in sides else ():
            sides[side][phase] += seconds
    return "; ".join(f"{side} {shares(sums)}" for side, sums in sides.items() if sums) or "nothing yet"


def shares(seconds: dict[str, float], least: float = 0.02) -> str:
    """`wait 62%, forward 12%`: the shares of a side's phases, largest first, those below `least` left out."""
    whole = sum(seconds.values())
    if whole <= 0:
        return START
    ordered = sorted(seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {part / whole:.0%}" for name, part in ordered if part >= least * whole)

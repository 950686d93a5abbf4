"""What a run folder holds besides its journal: configuration, metrics, events, and the state of the run."""

from __future__ import annotations

import fcntl
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.lab.report.notes import Note, Notes
from streamrl.observe.events import event_files, read_events
from streamrl.observe.metrics import incarnation, read_metrics
from streamrl.observe.timeline import Timeline
from streamrl.places import load_run

# steps at the start and at the end whose means are compared
ENDS = 5

Row = dict[str, Any]


@dataclass(slots=True)
class Run:
    """One run as it was recorded."""

    name: str  # distinct among the runs of a page
    folder: Path
    config: Config
    environment: dict[str, Any]
    rows: list[Row]  # of metrics.jsonl, one a learner step
    begin: float = 0.0  # time of the first record, seconds since the epoch; 0 without any
    timeline: Timeline = field(default_factory=Timeline)
    notes: list[Note] = field(default_factory=list)
    status: str = ""  # in words
    is_well: bool = True  # it is complete, going on, or was stopped on purpose

    @property
    def end(self) -> float:
        """Time of the newest record, seconds since the epoch."""
        return max(self.timeline.end, self.rows[-1]["time"] if self.rows else 0.0)

    def figures(self) -> list[dict[str, str]]:
        """The figures at the top of the page, each with what it means; none before the first step."""
        rows = self.rows
        if not rows:
            return []
        tokens = sum(row.get("tokens/trained") or 0 for row in rows)
        # Without the first step of each start, whose time is that of the servers'.
        timed = [row for before, row in pairwise(rows) if incarnation(before) == incarnation(row)]
        seconds = sum(row.get("time/step") or 0.0 for row in timed)
        later = sum(row.get("tokens/trained") or 0 for row in timed)
        oldest = max((row.get("staleness/max") or 0 for row in rows), default=0)
        ends = f"mean of the first and of the last {min(ENDS, len(rows))} steps"
        if self.config.trains_rows:
            found = [
                ("steps", f"{len(rows):,}", f"of {self.config.run.steps:,}"),
                ("loss", self._ends("loss/total"), ends),
                ("held-out loss", self._ends("loss/held_out"), ends),
                ("trained tokens", _short(tokens), "that entered the loss"),
                ("trained tokens/s", _short(later / seconds) if seconds else "–", "after the first step"),
                ("time", _duration(self.end - self.begin), "from the first process's start to the newest record"),
            ]
            return [{"name": name, "value": value, "hint": hint} for name, value, hint in found]
        found = [
            ("steps", f"{len(rows):,}", f"of {self.config.run.steps:,}"),
            ("reward", self._ends("reward/mean"), ends),
            ("pass rate", self._ends("pass_rate"), ends),
            ("trained tokens", _short(tokens), "that entered the loss"),
            ("trained tokens/s", _short(later / seconds) if seconds else "–", "after the first step"),
            ("staleness", f"{self._mean('staleness/mean'):.2f}", f"mean, in learner steps; largest {oldest:g}"),
            ("time", _duration(self.end - self.begin), "from the first process's start to the newest record"),
            ("effective samples", f"{self._mean('offpolicy/ess'):.1%}", "policy over behaviour policy, mean"),
            ("MFU", self._share("learner/mfu"), "of the learner's passes and updates, mean"),
            ("learner idle", f"{self._mean('idle/learner'):.0%}", "mean share of a step"),
            ("generators idle", f"{self._mean('idle/generator'):.0%}", "mean share of the time"),
        ]
        return [{"name": name, "value": value, "hint": hint} for name, value, hint in found]

    def _ends(self, name: str) -> str:
        first, last = (
            statistics.fmean(values) if (values := _values(rows, name)) else None
            for rows in (self.rows[:ENDS], self.rows[-ENDS:])
        )
        return "–" if first is None or last is None else f"{first:.3f} → {last:.3f}"

    def _share(self, name: str) -> str:
        return f"{self._mean(name):.1%}" if _values(self.rows, name) else "–"

    def _mean(self, name: str) -> float:
        values = _values(self.rows, name)
        return statistics.fmean(values) if values else float("nan")


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read each folder. Raises ConfigError where a configuration cannot be read."""
    names = _distinct([folder.resolve() for folder in folders])
    return [_read(folder, name) for folder, name in zip(folders, names, strict=True)]


def _read(folder: Path, name: str) -> Run:
    environment = folder / "environment.json"
    run = Run(
        name=name,
        folder=folder,
        config=load_run(folder),
        environment=json.loads(environment.read_text()) if environment.exists() else {},
        rows=list(read_metrics(folder)),
    )
    notes = Notes()
    for path in event_files(folder):
        for record in read_events(path):
            run.timeline.feed(record)
            notes.feed(record)
    run.notes = notes.in_order()
    run.begin = min(notes.begin or math.inf, run.rows[0]["time"] if run.rows else math.inf)
    if math.isinf(run.begin):
        run.begin = 0.0
    run.status, run.is_well = _status(folder, notes)
    return run


def _status(folder: Path, notes: Notes) -> tuple[str, bool]:
    """The state of the run, in words, and whether that is well."""
    if (stop := notes.stop) is not None:
        return str(stop["reason"]), stop["code"] == 0
    locks = folder / "locks"
    if _is_held(
        locks / ("replay-0" if (locks / "replay-0").exists() else "learner-0")
    ):  # `streamrl sft` has no service
        return "going on", True
    return ("not begun", True) if notes.begin is None else ("ended without a last word", False)


def _is_held(lock: Path) -> bool:
    """A process of the run lives: it holds the lock of its role (`locks.claim`, which waits for ours)."""
    if not lock.exists():
        return False
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _distinct(folders: Sequence[Path]) -> list[str]:
    """A short name for each folder: its own, with as many parents as tell it from the others."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _short(value: float) -> str:
    """A count with at most four digits: 950, 12.3k, 4.56M."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"

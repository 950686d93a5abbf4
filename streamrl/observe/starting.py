"""What the roles of a run do before its first step, by the events that they write.

    process ─▶ its imports ─▶ process.start ─▶ starting (what), ... ─▶ ready ─▶ groups of the first step

A role writes `starting` with `what` it begins; while it loads also how much of how many bytes. Whatever was in the
files before is of a former start, by its place and not by its time. Seconds are of the reader's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.config import Config
from streamrl.observe.bars import Report, clock, paced
from streamrl.observe.events import Events
from streamrl.observe.tail import Records

STARTING = "starting"

# Seconds between two records of a role that loads: as often as somebody looks.
LOADING_EVERY = 1.0

WAITS = "waits for the replay service"
IMPORTS = "imports"
READY = "ready"


def begin_part(events: Events, what: str) -> None:
    """Say what a role begins with. Example: `begin_part(events, "builds the model")`."""
    events.emit(STARTING, what=what)


def loading(events: Events, what: str) -> Report:
    """A report of bytes that become records, LOADING_EVERY seconds apart at least."""
    return paced(lambda done, total: events.emit(STARTING, what=what, done=done, total=total), LOADING_EVERY)


@dataclass(slots=True)
class _Role:
    doing: str
    since: float  # of its process, on the reader's clock


class Starting:
    """Follows the start of a run, from its construction on.

    Usage:
        starting = Starting(config, run_folder)
        starting.read()
        starting.lines()  # [("replay-0", "ready"), ("generators (2)", "servers load the model, 0:14"), ...]
    """

    def __init__(self, config: Config, run_folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._records = Records(run_folder)
        self._records.skip()
        self._now = now
        self._needed = config.replay.groups_per_step
        self._groups = 0
        workers = [f"generator-{index}" for index in range(config.workers)]
        models = [f"reward-model-{index}" for index in range(config.reward_model.processes)]
        self._others = [*models, *workers, "learner-0"]
        self._roles = {"replay-0": _Role(IMPORTS, now())} | {name: _Role(WAITS, now()) for name in self._others}
        if config.trains_rows:
            self._roles = {"learner-0": _Role(IMPORTS, now())}

    def read(self) -> None:
        """Take in what was written."""
        for record in self._records.read():
            self._feed(record)

    def lines(self) -> list[tuple[str, str]]:
        """(who, what they do and for how long); generators that do the same thing share a line."""
        found: dict[tuple[str, str], list[str]] = {}
        for name, role in self._roles.items():
            kind = "generators" if name.startswith("generator") else name
            found.setdefault((kind, role.doing), []).append(name)
        lines = []
        for (kind, doing), names in found.items():
            seconds = max(self._now() - self._roles[name].since for name in names)
            lasts = "" if doing in (READY, WAITS) else f", {clock(seconds)}"
            lines.append((names[0] if len(names) == 1 else f"{kind} ({len(names)})", doing + lasts))
        if len(self._roles) > 1 and all(role.doing == READY for role in self._roles.values()):
            lines.append(("first step", f"{min(self._groups, self._needed)} of {self._needed} groups"))
        return lines

    def __str__(self) -> str:
        """As one line of text."""
        return "; ".join(f"{who} {what}" for who, what in self.lines())

    def _feed(self, record: dict[str, Any]) -> None:
        name, event = record["role"], record["event"]
        if event == "group.accepted":
            self._groups += 1
        role = self._roles.get(name)
        if role is None:
            return
        if event == "process.start":
            role.doing = "starts"
        elif event == STARTING:
            role.doing = record["what"] + _share(record)
        elif event == READY:
            role.doing = READY
            self._begin_others(name)
        elif event == "process.end":
            role.doing = "ended"

    def _begin_others(self, name: str) -> None:
        """They are started when the replay service listens."""
        for other in self._others if name == "replay-0" else ():
            if self._roles[other].doing == WAITS:
                self._roles[other] = _Role(IMPORTS, self._now())


def _share(record: dict[str, Any]) -> str:
    """` 1.2 of 3.1 GB` of a role that loads."""
    if not record.get("total"):
        return ""
    scale, unit = (1e9, "GB") if record["total"] >= 1e9 else (1e6, "MB")
    return f" {record['done'] / scale:.1f} of {record['total'] / scale:.1f} {unit}"

"""One child process of the supervisor: how it is started, and what it tells of itself in its events and its log.

Whatever was reported before the present start is passed over by its place in the file, not by its time: the machine's
clock may be set while a run goes on.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.last_words import LastWord, first_of
from streamrl.observe.events import parse_record
from streamrl.observe.tail import Tail

LOG_LINES = 20  # last lines of a log that a report quotes


@dataclass
class Role:
    """One child process, and its events since its start."""

    name: str
    command: list[str]
    log: Path
    events: Path
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0  # on the monotonic clock
    restarts: int = 0
    last_events: dict[str, dict[str, Any]] = field(default_factory=dict)  # the last event of each name since the start

    def __post_init__(self) -> None:
        self._tail = Tail(self.events)
        self._log_start = 0

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._tail.skip()
        self.last_events.clear()
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **self.environment},
            )
        self.started = time.monotonic()

    @property
    def pid(self) -> int:
        """The id of its process; it was started."""
        assert self.process is not None
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process runs."""
        return self.process.poll() if self.process else None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.exit_code is None

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    def terminate(self) -> None:
        """SIGTERM, to the process alone."""
        if self.process is not None:
            self.process.terminate()

    def event(self, name: str) -> dict[str, Any] | None:
        """The last event of this name since the role's start; of a span, its end without an error."""
        if self.process is None:
            return None  # what is in the file is of a former run's
        for line in self._tail.lines():
            record = parse_record(line)
            if record is not None and record.get("phase") != "begin" and "error" not in record:
                self.last_events[record["event"]] = record
        return self.last_events.get(name)

    def is_ready(self) -> bool:
        return self.event("ready") is not None

    def given_up(self) -> str | None:
        """Why the role ended for good: started again, it would end the same way."""
        event = self.event("gave_up")
        return event["reason"] if event else None

    def last_word(self) -> LastWord | None:
        """Why it ended, where its log since the start says so in one line."""
        if self.process is None:
            return None
        with self.log.open(errors="replace") as lines:
            lines.seek(self._log_start)
            return first_of(lines)

    def last_lines(self) -> str:
        if not self.log.exists():
            return "(no log)"
        with self.log.open(errors="replace") as lines:
            return "".join(f"  {line.rstrip()}\n" for line in deque(lines, LOG_LINES))

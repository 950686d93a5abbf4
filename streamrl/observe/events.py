"""The event log: what each process did and when, one JSON object a line.

Each process writes its own `RUN/events/ROLE-N.jsonl`; `merge` sorts them into `RUN/events.jsonl`.
A record is `{"time": ..., "role": ..., "event": ..., **fields}`; a span is two records of one name, with
`"phase": "begin"` and `"phase": "end"` (the latter with `seconds`), joined by `span`.
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from streamrl.observe.disk import append
from streamrl.whole_files import drafted

log = logging.getLogger(__name__)

FORMAT = 1  # of the records: a field with another meaning makes another format, a new field does not

DISORDER = 256  # records by which the threads of a process may overtake each other

_JSON = json.JSONEncoder(default=str, separators=(",", ":"))

_RESERVED = frozenset({"time", "role", "event"})

# Taken once a process: its times then never jump when the machine's clock is set.
_OFFSET = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch on this process's one monotonic clock."""
    return _OFFSET + time.monotonic()


def event_path(run_folder: Path, role: str, index: int = 0) -> Path:
    """`RUN/events/ROLE-N.jsonl`."""
    return run_folder / "events" / f"{role}-{index}.jsonl"


class Events:
    """What happens in a process, kept nowhere."""

    def emit(self, event: str, /, **fields: Any) -> None:
        """Add one record."""


class EventLog(Events):
    """Appends events of one process; safe to share between its threads.

    Every record is one `write` in append mode: nothing is buffered, so that kill -9 loses no record and
    an idle process hides none. A few microseconds a record.

    Usage:
        events = EventLog(event_path(run_folder, "generator", 0), "generator-0")
        events.emit("publish.applied", version="3.0")
        with events.span("group", group_id=7) as fields:
            fields["tokens"] = 96
    """

    def __init__(self, path: Path, role: str, *, starts: bool = True) -> None:
        """`starts` False: for a process that may find nothing to do; it says `start` itself, or never began."""
        self.path = path
        self.role = role
        self._started = False
        self.lost = 0  # records that could not be written
        self._spans = itertools.count()
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _is_torn(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if torn:  # a predecessor was cut in the middle of a record: end that line, keep the rest readable
            os.write(self._file, b"\n")
        if starts:
            self.start()

    def start(self) -> None:
        """Say that the process has begun its work."""
        self._started = True
        self.emit("process.start", pid=os.getpid(), clock_offset=_OFFSET)

    def emit(self, event: str, /, **fields: Any) -> None:
        """Append one record. Values that JSON does not know are written as their text.

        Raises ValueError for a field named time, role or event. After `close` a record is only logged: what a
        thread still says while its process ends must not make the end a failure. Nor may a full disk end a process
        that only wanted to tell something: such a record is counted in `lost`.
        """
        if self._file < 0:
            log.warning("event %r came after %s was closed", event, self.path)
            return
        if clash := _RESERVED & fields.keys():
            raise ValueError(f"event {event!r}: field {min(clash)!r} is the log's own")
        record = {"time": round(now(), 6), "role": self.role, "event": event, **fields}
        try:
            append(self._file, _JSON.encode(record).encode() + b"\n")
        except OSError as error:
            if self.lost == 0:
                log.error("%s: %s; records are lost until there is room", self.path, error.strerror)
            self.lost += 1

    @contextmanager
    def span(self, event: str, /, **fields: Any) -> Iterator[dict[str, Any]]:
        """Two records round a block. The dict that it gives becomes fields of the end record.

        When the block raises, the end record carries `error`, and the exception goes on.
        """
        span, begin = f"{os.getpid()}.{next(self._spans)}", now()
        self.emit(event, phase="begin", span=span, **fields)
        result: dict[str, Any] = {}
        try:
            yield result
        except BaseException as error:
            result["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.emit(event, phase="end", span=span, seconds=round(now() - begin, 6), **(fields | result))

    def close(self) -> None:
        """Write the last record. May be called twice."""
        if self._file < 0:
            return
        if self._started:
            self.emit("process.end", pid=os.getpid())
        os.close(self._file)
        self._file = -1


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file in the order of writing; a line that a crash has torn is passed over."""
    with path.open("rb") as lines:
        for line in lines:
            record = parse_record(line)
            if record is not None:
                yield record


def role_events(run_folder: Path, role: str) -> Iterator[dict[str, Any]]:
    """The records of a role's first process, as `read_events`; none where it has written none."""
    path = event_path(run_folder, role)
    if path.exists():
        yield from read_events(path)


def event_files(run_folder: Path) -> list[Path]:
    """The files of all processes of a run, by name."""
    return sorted((run_folder / "events").glob("*.jsonl"))


def events_by_time(run_folder: Path) -> Iterator[dict[str, Any]]:
    """The records of all processes of a run by their time, each process's in its own order.

    One after another: of a long run no memory holds them all.
    """
    for _, _, record in heapq.merge(*map(_timed, event_files(run_folder)), key=itemgetter(0)):
        yield record


def _timed(path: Path) -> Iterator[tuple[float, int, dict[str, Any]]]:
    """The records of a file with their times and places, in order but for those further apart than DISORDER."""
    waiting: list[tuple[float, int, dict[str, Any]]] = []
    for place, record in enumerate(read_events(path)):
        heapq.heappush(waiting, (record["time"], place, record))
        if len(waiting) > DISORDER:
            yield heapq.heappop(waiting)
    while waiting:
        yield heapq.heappop(waiting)


def parse_record(line: bytes) -> dict[str, Any] | None:
    """One line of an event log, or None for a torn or empty one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.keys() >= _RESERVED else None


def merge(run_folder: Path) -> Path:
    """Write `RUN/events.jsonl`, all records by time, replaced as a whole; returns its path."""
    target = run_folder / "events.jsonl"
    with drafted(target) as draft, draft.open("w") as merged:
        merged.writelines(json.dumps(record, separators=(",", ":")) + "\n" for record in events_by_time(run_folder))
    return target


def _is_torn(path: Path) -> bool:
    """True when the file's last line has no end."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as existing:
        existing.seek(-1, os.SEEK_END)
        return existing.read(1) != b"\n"

"""What is appended to files that other processes write: lines, and a run folder's records and rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl.observe.events import event_files, parse_record
from streamrl.observe.metrics import parse_row


class Tail:
    """The complete lines that were appended to a file since the last look; a replaced one is read from the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._file_id = 0

    def skip(self) -> None:
        """Pass over what is there now."""
        if self._path.exists():
            status = self._path.stat()
            self._file_id, self._position = status.st_ino, status.st_size

    def lines(self) -> Iterator[bytes]:
        """The new lines, each with its end."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file_id or status.st_size < self._position:
                self._file_id, self._position = status.st_ino, 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield line


class Rows:
    """The metrics of a run as they come, in the order of its steps.

    Usage:
        rows = Rows(run_folder)
        rows.read()
        rows.all[-1]["step"]
    """

    def __init__(self, run_folder: Path) -> None:
        self.all: list[dict[str, Any]] = []
        self._tail = Tail(run_folder / "metrics.jsonl")

    def read(self) -> None:
        """Take what is new. A resume that begins further back replaces the steps that it runs again."""
        for line in self._tail.lines():
            row = parse_row(line)
            if row is None:
                continue
            while self.all and self.all[-1]["step"] >= row["step"]:
                self.all.pop()
            self.all.append(row)


class Records:
    """The events of all roles of a run as they come, each role's in their order."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._tails: dict[Path, Tail] = {}

    def skip(self) -> None:
        """Pass over what is there now."""
        for path in event_files(self._run_folder):
            self._tails.setdefault(path, Tail(path)).skip()

    def read(self) -> Iterator[dict[str, Any]]:
        """What is new, one file after another. A role that starts later is found."""
        for path in event_files(self._run_folder):
            for line in self._tails.setdefault(path, Tail(path)).lines():
                if (record := parse_record(line)) is not None:
                    yield record

"""What a run writes, as it comes: rows of metrics for a caller that iterates, and calls of the user's functions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.observe.ending import saved_steps
from streamrl.observe.metrics import read_metrics
from streamrl.observe.tail import Rows

POLL = 0.2  # seconds between two looks at the files

Row = dict[str, Any]


class Metrics:
    """The rows of a run, one a learner step. An iteration begins with the first, and ends with the run.

    Usage:
        for row in run.metrics: print(row["step"], row["reward/mean"])
        async for row in run.metrics: ...
        run.metrics.rows  # those that are there
    """

    def __init__(self, run_folder: Path, is_over: Callable[[], bool]) -> None:
        self._folder = run_folder
        self._is_over = is_over

    @property
    def rows(self) -> list[Row]:
        """Those that are there now; each has the names of the metrics page as its keys."""
        return list(read_metrics(self._folder))

    @property
    def latest(self) -> Row | None:
        """The last of them; None before the first step."""
        return next(reversed(self.rows), None)

    def __iter__(self) -> Iterator[Row]:
        for rows in self._new():
            yield from rows
            if not rows:
                time.sleep(POLL)

    async def __aiter__(self) -> AsyncIterator[Row]:
        for rows in self._new():
            for row in rows:
                yield row
            if not rows:
                await asyncio.sleep(POLL)

    def _new(self) -> Iterator[list[Row]]:
        """What is new at each look, until the run is over. A step that is trained again after a crash comes once."""
        rows, last = Rows(self._folder), 0
        while True:
            over = self._is_over()  # asked first: what is written before the end is seen
            rows.read()
            new = [row for row in rows.all if row["step"] > last]
            last = max([last, *(row["step"] for row in new)])
            if over and not new:
                return
            yield new


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions of the user's that are called while a run goes on; None: not."""

    on_step: Callable[[Row], Any] | None = None  # the metrics of a learner step
    on_checkpoint: Callable[[Path], Any] | None = None  # the folder of a checkpoint that is complete
    on_evaluation: Callable[[Row], Any] | None = None  # a row with the metrics `eval/...`


class Caller:
    """Calls them, each for what is new since the run was started."""

    def __init__(self, callbacks: Callbacks, run_folder: Path) -> None:
        self._callbacks = callbacks
        self._folder = run_folder
        self._rows = Rows(run_folder)
        self._rows.read()
        self._step = max((row["step"] for row in self._rows.all), default=0)
        self._evaluated = _evaluated(self._rows.all)
        self._saved = set(saved_steps(run_folder))

    def call(self) -> None:
        """Raises whatever the user's functions raise."""
        self._rows.read()
        for row in [row for row in self._rows.all if row["step"] > self._step]:
            self._step = row["step"]
            if self._callbacks.on_step is not None:
                self._callbacks.on_step(row)
        for step in sorted(set(saved_steps(self._folder)) - self._saved):
            self._saved.add(step)
            if self._callbacks.on_checkpoint is not None:
                self._callbacks.on_checkpoint(self._folder / "checkpoints" / f"step_{step}")
        evaluated = _evaluated(self._rows.all) - self._evaluated
        for row in [row for row in self._rows.all if row.get("eval/step") in evaluated]:
            self._evaluated.add(row["eval/step"])
            if self._callbacks.on_evaluation is not None:
                self._callbacks.on_evaluation(row)


def _evaluated(rows: list[Row]) -> set[float]:
    """The steps whose weights were evaluated."""
    return {row["eval/step"] for row in rows if row.get("eval/step") is not None}

"""Run folders whose events are written by hand, at times that a test chooses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any


class Recorded:
    """Writes `events/ROLE.jsonl` and `metrics.jsonl` of a run; times in seconds from its start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._spans = itertools.count()
        self._records: dict[str, list[dict[str, Any]]] = {}

    def point(self, role: str, time: float, event: str, **fields: Any) -> None:
        self._records.setdefault(role, []).append({"time": time, "role": role, "event": event, **fields})

    def span(self, role: str, event: str, begin: float, end: float | None, **fields: Any) -> None:
        """`end` None: its process never told."""
        span = f"1.{next(self._spans)}"
        self.point(role, begin, event, phase="begin", span=span, **fields)
        if end is not None:
            self.point(role, end, event, phase="end", span=span, seconds=end - begin, **fields)

    def life(self, role: str, begin: float, ready: float | None, end: float | None) -> None:
        self.point(role, begin, "process.start", pid=1)
        if ready is not None:
            self.point(role, ready, "ready")
        if end is not None:
            self.point(role, end, "process.end", pid=1)

    def row(self, step: int, time: float, **metrics: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": time, **metrics}) + "\n")

    def write(self) -> Path:
        """Put what was told into the files, each in order of time."""
        (self.folder / "events").mkdir(parents=True, exist_ok=True)
        for role, records in self._records.items():
            records.sort(key=lambda record: record["time"])
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (self.folder / "events" / f"{role}.jsonl").write_text(lines)
        return self.folder


def small_run(folder: Path) -> Recorded:
    """Two steps of a learner and one generator, from second 0 to 20.

    learner    start 0-1, wait 1-8, step 8-12 (forward 8-9, backward 9-11, optimizer 11-12), offer 12-13,
               wait 13-16, step 16-19, idle to 20
    generator  start 0-2, groups 2-10, nothing 10-13, pause 13-14, groups 13-18, nothing to 20
    """
    run = Recorded(folder)
    run.life("learner-0", 0, 1, 20)
    run.life("generator-0", 0, 2, 20)
    run.life("replay-0", 0, 0.5, 20)
    run.span("learner-0", "learner.wait", 1, 8, step=0)
    run.span("learner-0", "learner.step", 8, 12, step=0)
    phases = [["forward", 8, 9], ["backward", 9, 11], ["optimizer", 11, 12]]
    run.point("learner-0", 11.9, "learner.phases", step=0, phases=phases)
    run.span("learner-0", "learner.offer", 12, 13, version="1.0")
    run.span("learner-0", "publish", 13, 14, server="server-0", version="1.0")
    run.span("learner-0", "learner.wait", 13, 16, step=1)
    run.span("learner-0", "learner.step", 16, 19, step=1)
    tickets = [(0, 2, 6), (1, 2, 10), (2, 6, 10), (3, 13, 18), (4, 13, 18)]
    for group_id, begin, end in tickets:
        run.point("replay-0", begin - 0.1, "tickets", worker="generator-0", tickets=[[group_id, 0]])
        run.span("generator-0", "group", begin, end, group_id=group_id, attempt=0, tokens=100)
        run.point("replay-0", end + 0.1, "group.accepted", worker="generator-0", group_id=group_id, attempt=0)
    run.span("generator-0", "publish.apply", 13, 14, server="server-0", version="1.0")
    run.point("replay-0", 7.5, "batch", step=0, groups=1, waiting=0, bytes=10, group_ids=[0])
    run.point("replay-0", 15.5, "batch", step=1, groups=2, waiting=1, bytes=10, group_ids=[1, 2])
    run.point("replay-0", 15.7, "worker.silent", worker="generator-9")
    run.row(1, 12, **{"tokens/trained": 100, "tokens/generated": 100, "reward/mean": 0.25})
    run.row(2, 19, **{"tokens/trained": 200, "tokens/generated": 200, "reward/mean": 0.5})
    run.write()
    return run

"""What a real run shows of its history: its events and checkpoints, as the record that `benchmarks/faults.py` judges.

    learner   ready (version)        ─▶ Start: the steps from there on did not happen
              learner.step, its end  ─▶ Trained, with the groups of ...
    service   batch (step, groups)   ... the batch that was delivered last for that step
    workers   group, its end         ─▶ the prompt of a group

A run without a journal is judged in the same way as one with: nothing here reads the journal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fault_roles import Start, Trained
from benchmarks.faults import Verdict, judge_record
from streamrl.config import Config
from streamrl.observe.events import event_path, read_events
from streamrl.observe.metrics import read_metrics
from streamrl.types import Ledger

Event = dict[str, Any]

UNTOLD = ("", -1)  # the prompt of a group that nobody told of: its own is then missing


def judge_run(folder: Path, config: Config, damaged: list[float]) -> Verdict:
    """The verdict on the events of a run. `damaged`: when something was, seconds since the epoch."""
    return judge_record(record_of(folder, config), last_ledger(folder), config, damaged, Verdict())


def record_of(folder: Path, config: Config) -> list[Start | Trained]:
    """Every start and every trained step of the run's learners, in the order in which they happened."""
    batches = _batches(folder)
    prompts = _prompts(folder, config.task.shares[0].key)
    ages = {int(row["step"]) - 1: int(row["staleness/max"] or 0) for row in read_metrics(folder)}  # of the last time
    quarantined = {(event["step"], event["group_id"]) for event in events(folder, "learner", "learner.quarantined")}
    record: list[Start | Trained] = []
    for event in events_of(folder, "learner"):
        if event["event"] == "ready":
            record.append(Start(version=event["version"], checkpoint=0.0))
        elif event["event"] == "learner.step" and event["phase"] == "end" and "error" not in event:
            step = event["step"]
            ids = next(ids for time, ids in reversed(batches[step]) if time <= event["time"])
            record.append(
                Trained(
                    step=step,
                    time=event["time"],
                    group_ids=tuple(ids),
                    prompts=tuple(prompts.get(group_id, UNTOLD) for group_id in ids),
                    digests=(),
                    oldest=step - ages.get(step, 0),
                    placeholders=0,
                    quarantined=tuple(group_id for group_id in ids if (step, group_id) in quarantined),
                )
            )
    return record


def last_ledger(folder: Path) -> Ledger:
    """That of the newest checkpoint; an empty one where there is none."""
    names = (path.name.removeprefix("step_") for path in (folder / "checkpoints").glob("step_*"))
    steps = [int(name) for name in names if name.isdecimal()]  # others are set aside
    if not steps:
        return Ledger()
    description = json.loads((folder / "checkpoints" / f"step_{max(steps)}" / "checkpoint.json").read_text())
    return msgspec.convert(description["ledger"], Ledger, str_keys=True)


def delivered(folder: Path, step: int) -> Sequence[int]:
    """The groups of a step as it was delivered last, in order."""
    return _batches(folder)[step][-1][1]


def events_of(folder: Path, role: str, index: int = 0) -> Iterator[Event]:
    """Those of one role so far."""
    path = event_path(folder, role, index)
    return read_events(path) if path.exists() else iter(())


def events(folder: Path, role: str, name: str) -> list[Event]:
    """The events of one name of a role, so far."""
    return [event for event in events_of(folder, role) if event["event"] == name]


def _batches(folder: Path) -> dict[int, list[tuple[float, list[int]]]]:
    """Step: when it was put together, and of which groups."""
    found: dict[int, list[tuple[float, list[int]]]] = {}
    for event in events(folder, "replay", "batch"):
        found.setdefault(event["step"], []).append((event["time"], event["group_ids"]))
    return found


def _prompts(folder: Path, task: str) -> dict[int, tuple[str, int]]:
    """Group id: its prompt, as the last worker that generated it reported."""
    told = [
        event
        for path in (folder / "events").glob("*.jsonl")
        for event in read_events(path)
        if event["event"] == "group" and event["phase"] == "end"
    ]
    return {event["group_id"]: (task, event["prompt_index"]) for event in sorted(told, key=lambda each: each["time"])}

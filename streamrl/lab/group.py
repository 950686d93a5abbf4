"""`streamrl group RUN ID`: the life of one group, from its first ticket to the checkpoint that contains it.

Read are the event logs, which have the times, and the journal, which has what a ticket asked for and what came back.
Both may still be written to. What the events say of the phase goes through the table of `replay/life.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamrl.config.file import ConfigError
from streamrl.observe.ending import saved_steps
from streamrl.observe.events import read_events
from streamrl.replay.history import read_journal
from streamrl.replay.life import LIFE, Event, Phase
from streamrl.replay.records import Completed, Dropped, Issued
from streamrl.types import PolicyVersion

# What an event of the replay service does to the groups that it names.
MOVES = {event.value: event for event in Event} | {
    "ticket.expired": Event.LOSE,
    "group.placeholders": Event.COMPLETE,
}

# What is printed behind the name of an event.
TEXTS = {
    "tickets": "{worker}, which must have step {required} or newer",
    "ticket.adopted": "{worker} named it after a restart of the service: it keeps it",
    "ticket.expired": "{worker}: {reason}",
    "ticket.lost": "{worker}: {reason}",
    "group.refused": "{worker}: {reason}",
    "group.duplicate": "{worker} sent it again",
    "group.exhausted": "no further ticket after {issues}",
    "group.placeholders": "placeholders take its place",
    "group.accepted": "{worker}: {answers} answers, {tokens} tokens, pass rate {pass_rate}",
    "group.dropped": "{worker}: {reason}",
    "batch": "step {step}",
    "group.quarantined": "{reason}",
    "groups.returned": "its step is put together again",
    "use.returned": "its last step is put together again, an earlier one keeps it",
    "group.regenerated": "its frames cannot be read",
    "groups.forgotten": "no record is kept any more",
    "ready": "the replay service was started again; a ticket that was out is nobody's until a worker names it",
    "publish.acknowledged": "a server has version {version}: its slot is free",
    "learner.saved": "checkpoint of version {version}, the first that contains it",
    "begin": "the worker begins to generate",
    "end": "the worker is done after {seconds} s",
}


@dataclass(slots=True)
class GroupLife:
    """What the public records of a run say of one group."""

    group_id: int
    task: str = "?"
    prompt_index: int | None = None
    phase: Phase = Phase.WAITING
    attempt: int | None = None
    step: int | None = None  # that consumed it, the last one
    steps: list[int] = field(default_factory=list)  # all of them, ascending
    saved: str | None = None  # the first version in a checkpoint that contains it
    checkpoints: list[str] = field(default_factory=list)  # folders that are there and contain it
    events: list[dict[str, Any]] = field(default_factory=list)
    lost: bool = False  # it waits because its ticket was lost: of that a restarted service knows nothing


def main(run_folder: Path, group_id: int, as_json: bool = False) -> int:
    """Print one group's life. Raises ConfigError where the run has no such group."""
    life = read_life(run_folder, group_id)
    if as_json:
        fields = ("group_id", "task", "prompt_index", "phase", "attempt", "step", "steps", "saved", "checkpoints")
        print(json.dumps({name: getattr(life, name) for name in (*fields, "events")}, default=str))
        return 0
    step = f", step {' and '.join(map(str, life.steps))}" if life.steps else ""
    print(f"group {group_id} of {run_folder}: {life.task} prompt {life.prompt_index}, {life.phase}{step}")
    width = max(len(event["event"]) for event in life.events)
    for event in life.events:
        at = time.strftime("%H:%M:%S", time.localtime(event["time"])) + f"{event['time'] % 1:.3f}"[1:]
        attempt = f"attempt {event['attempt']}" if "attempt" in event else ""
        print(f"  {at}  {event['event']:{width}}  {attempt:10} {_text(event)}".rstrip())
    if life.step is not None:
        print(f"  checkpoints that contain it: {', '.join(life.checkpoints) or 'none is there'}")
    return 0


def read_life(run_folder: Path, group_id: int) -> GroupLife:
    """Follow a group through the records of its run. Raises ConfigError."""
    life = GroupLife(group_id)
    asked, answers, newest = _journal(run_folder / "journal", group_id, life)
    for record in _service_events(run_folder):
        if record["event"] == "tickets":
            newest = max(newest, *(key[0] for key in record["tickets"]))
        _follow(life, record)
    if not life.events:
        known = f"0 to {newest}" if newest >= 0 else "none, because no ticket is recorded"
        raise ConfigError(f"{run_folder}: no group {group_id}; allowed: {known}")
    for event in life.events:
        if event["event"] == "tickets":
            event["required"] = asked.get(event["attempt"], "?")
        elif event["event"] == "group.accepted":
            event.update(answers.get(event["attempt"], {}))
    for path in sorted((run_folder / "events").glob("generator-*.jsonl")):
        life.events += _generator_events(path, group_id)
    life.events.sort(key=lambda event: event["time"])
    if life.step is not None:
        life.checkpoints = [f"step_{step}" for step in saved_steps(run_folder) if step > life.step]
    return life


def _journal(folder: Path, group_id: int, life: GroupLife) -> tuple[dict[int, int], dict[int, dict[str, Any]], int]:
    """By attempt, the step that a ticket required and what the answer was; the newest group of all."""
    asked, answers, newest = dict[int, int](), dict[int, dict[str, Any]](), -1
    for entry in read_journal(folder):
        match entry.record:
            case Issued(ticket=ticket):
                newest = max(newest, ticket.group_id)
                if ticket.group_id == group_id:
                    asked[ticket.attempt] = ticket.issued_version.step
                    life.task, life.prompt_index = ticket.task, ticket.prompt_index
            case Completed() as record if record.group_id == group_id:
                answers[record.attempt] = {
                    "answers": record.answers,
                    "pass_rate": round(record.pass_rate, 3),
                    "oldest": record.oldest,
                    "bytes": record.size,
                    "segment": entry.place.segment,
                }
            case Dropped() as record if record.group_id == group_id:
                life.prompt_index = record.prompt_index
    return asked, answers, newest


def _service_events(run_folder: Path) -> Iterator[dict[str, Any]]:
    path = run_folder / "events" / "replay-0.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; allowed: a run whose replay service has been started")
    yield from read_events(path)


def _follow(life: GroupLife, record: dict[str, Any]) -> None:
    """One event of the service, where it is one of this group's."""
    name = record["event"]
    if name in ("ready", "publish.acknowledged", "learner.saved"):
        _around(life, record)
        return
    keys = [key for key in record["tickets"] if key[0] == life.group_id] if name == "tickets" else []
    named = life.group_id in (record.get("group_id"), *record.get("group_ids", ()))
    if life.group_id in record.get("kept", ()):
        return  # it may be trained again
    if not (keys or named or (life.step is not None and life.step in record.get("steps", ()))):
        return
    event = {
        field: value
        for field, value in record.items()
        if field not in ("role", "tickets", "group_ids", "groups", "steps", "kept", "reused")
    }
    if keys:
        event["attempt"] = keys[0][1]
    life.attempt = event.get("attempt", life.attempt)
    life.events.append(event)
    if name in MOVES:
        _move(life, MOVES[name])
    if name == "batch":
        life.steps = sorted({*life.steps, record["step"]})
    elif name == Event.TAKE_BACK:
        life.steps = [step for step in life.steps if step < record["step"]]
    elif life.phase not in (Phase.CONSUMED, Phase.QUARANTINED, Phase.FORGOTTEN):
        life.steps, life.saved = [], None
    life.step = life.steps[-1] if life.steps else None


def _move(life: GroupLife, event: Event) -> None:
    """Follow the table. Where events are missing, those that must have happened are assumed."""
    if event is Event.CONSUME and life.phase in (Phase.CONSUMED, Phase.QUARANTINED):
        return  # delivered again
    if life.phase is Phase.FORGOTTEN:
        life.phase = Phase.WAITING
    for before in (*LIFE.path(life.phase, event), event):
        life.phase = LIFE.next(life.phase, before)
    life.lost = event is Event.LOSE or (life.lost and event is Event.EXHAUST)


def _around(life: GroupLife, record: dict[str, Any]) -> None:
    """An event that names no groups: it is the group's where it comes at its time."""
    if record["event"] == "ready":
        if life.events and life.phase not in (Phase.CONSUMED, Phase.QUARANTINED, Phase.FORGOTTEN):
            life.events.append({"time": record["time"], "event": "ready"})
            life.phase = Phase.ISSUED if life.lost else life.phase
            life.lost = False
        return
    if life.step is None or PolicyVersion.parse(record["version"]).step <= life.step:
        return
    event = {name: value for name, value in record.items() if name in ("time", "event", "version")}
    if record["event"] == "learner.saved":
        if life.saved is None:
            life.saved = record["version"]
            life.events.append(event)
    elif not any(other["event"] == "publish.acknowledged" for other in life.events):
        life.events.append(event)


def _generator_events(path: Path, group_id: int) -> Iterator[dict[str, Any]]:
    """When a worker began the group and was done with it."""
    for record in read_events(path):
        if record["event"] == "group" and record.get("group_id") == group_id and "phase" in record:
            kept = {name: record[name] for name in ("time", "attempt", "seconds") if name in record}
            yield kept | {"event": record["phase"], "worker": record["role"]}


def _text(event: dict[str, Any]) -> str:
    fields = dict.fromkeys(("worker", "required", "answers", "pass_rate", "seconds", "reason", "issues"), "?") | event
    return TEXTS.get(event["event"], "").format_map(
        {name: "?" if each is None else each for name, each in fields.items()}
    )

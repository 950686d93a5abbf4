"""A run as a trace for Perfetto or chrome://tracing: one track for each process, arrows from ticket to step.

The format is Chrome's Trace Event Format: an object with `traceEvents`, times in microseconds. Slices of one
thread must nest, so that the groups of a worker, which overlap, are laid into lanes, as many as ran at once.
"""

from __future__ import annotations

import bisect
import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.observe.events import event_files, read_events
from streamrl.observe.metrics import read_metrics
from streamrl.observe.roofline import bottlenecks
from streamrl.observe.timeline import PUBLISHER, Timeline, Track, kind_of
from streamrl.whole_files import drafted

Event = dict[str, Any]
_Place = tuple[int, int]  # process and thread

# Thread numbers within a process: what it does, its groups from LANES on, what happened to it.
STATE, LANES, POINTS = 0, 1, 999

# Metrics that are drawn as curves.
COUNTERS = {
    "buffer/groups": "groups that wait",
    "tokens/trained_per_s": "trained tokens/s",
    "staleness/mean": "mean staleness",
    "reward/mean": "mean reward",
}

# Seconds that a batch or a hand-out of tickets is drawn with: an arrow needs a slice to begin at.
POINT = 2e-6

# Events that are slices and arrows, or that every group or step has.
_DRAWN_OTHERWISE = frozenset(
    {
        "process.start",
        "process.end",
        "learner.phases",
        "learner.taken_off",
        "learner.ranks",
        "learner.progress",
        "group.accepted",
        "batch",
        "tickets",
    }
)


@dataclass(frozen=True, slots=True)
class _Lane:
    """A group in the lane that it is drawn in."""

    lane: int
    group_id: int
    attempt: int
    begin: float
    end: float
    tokens: int


def write(run_folder: Path, target: Path) -> int:
    """Write the trace of a run to `target`, whole or not at all. Returns the number of events."""
    events = list(trace(run_folder))
    with drafted(target) as draft, draft.open("w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file, separators=(",", ":"))
    return len(events)


def write_seconds(run_folder: Path, target: Path) -> int:
    """Write a line for every second: time, what each role did for most of it, who held the run up. Returns the lines.

    The first line names the columns; a role without a process at that time is empty. Values are separated by commas.
    """
    timeline = Timeline.read(run_folder)
    begin, end = timeline.begin, timeline.end
    roles = sorted(timeline.tracks)
    held = bottlenecks(timeline, begin, end)
    with drafted(target) as draft, draft.open("w") as file:
        file.write(",".join(["second", "time", *roles, "held_up_by"]) + "\n")
        for index, (time, doing) in enumerate(timeline.seconds(begin, end)):
            words = [str(index), f"{time:.3f}", *(doing.get(role, "") for role in roles), held[index]]
            file.write(",".join(words) + "\n")
    return len(held)


def trace(run_folder: Path) -> Iterator[Event]:
    """The events of the trace, in no order: viewers sort them."""
    timeline = Timeline.read(run_folder)
    begin = timeline.begin
    numbers = {role: number for number, role in enumerate(_order(timeline, run_folder), start=1)}
    for role, number in numbers.items():
        yield _name(number, "process_name", role)
        yield {**_name(number, "process_sort_index", role), "args": {"sort_index": number}}
        track = timeline.tracks.get(role)
        if track is not None:
            yield _name(number, "thread_name", "state", STATE)
            yield from _states(track, number, begin)
    lanes = {track.role: list(_lanes(track)) for track in timeline.generators}
    for role, laid in lanes.items():
        yield from _groups(laid, numbers[role], begin)
    if "replay-0" in numbers:
        records = list(read_events(run_folder / "events" / "replay-0.jsonl"))
        yield from _replay(records, numbers["replay-0"], begin)
        yield from _arrows(records, lanes, timeline, numbers, begin)
    for path in event_files(run_folder):
        yield from _points(path, numbers, begin)
    yield from _counters(run_folder, numbers, begin)


def _order(timeline: Timeline, run_folder: Path) -> list[str]:
    """Roles from where data comes to where it goes: generators, service, learner, publisher, anybody else."""
    files = [path.stem for path in event_files(run_folder)]
    ranks = {"generator": 0, "reward-model": 1, "replay": 2, "learner": 3, PUBLISHER: 4}
    return sorted({*files, *timeline.tracks}, key=lambda role: (ranks.get(kind_of(role), len(ranks)), len(role), role))


def _states(track: Track, number: int, begin: float) -> Iterator[Event]:
    for phase in track.phases(track.begin, track.last):
        yield _slice(phase.name, (number, STATE), phase.begin - begin, phase.seconds)


def _lanes(track: Track) -> Iterator[_Lane]:
    """Each group in the lowest lane that is free when it begins."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []  # (end, lane)
    for group in sorted(track.groups, key=lambda group: group.begin):
        while busy and busy[0][0] <= group.begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (group.end, lane))
        yield _Lane(lane, group.group_id, group.attempt, group.begin, group.end, group.tokens)


def _groups(laid: Sequence[_Lane], number: int, begin: float) -> Iterator[Event]:
    for lane in range(1 + max((group.lane for group in laid), default=-1)):
        yield _name(number, "thread_name", f"groups, lane {lane}", LANES + lane)
    for group in laid:
        arguments = {"group_id": group.group_id, "attempt": group.attempt, "tokens": group.tokens}
        name = f"group {group.group_id}"
        place = (number, LANES + group.lane)
        yield _slice(name, place, group.begin - begin, group.end - group.begin, arguments)


def _replay(records: Sequence[Event], number: int, begin: float) -> Iterator[Event]:
    yield _name(number, "thread_name", "batches", STATE)
    yield _name(number, "thread_name", "tickets", LANES)
    for record, place in _drawn(records, "batch"):
        arguments = {"step": record["step"], "groups": record["groups"]}
        yield _slice(f"batch {record['step']}", (number, STATE), place - begin, POINT, arguments)
        yield _counter("buffer/groups", number, place - begin, record["waiting"])
    for record, place in _drawn(records, "tickets"):
        arguments = {"worker": record["worker"], "tickets": len(record["tickets"])}
        yield _slice("tickets", (number, LANES), place - begin, POINT, arguments)


def _drawn(records: Sequence[Event], event: str) -> Iterator[tuple[Event, float]]:
    """(record, where it is drawn) of the events of one name: behind the one before, where both came at once."""
    free = 0.0
    for record in records:
        if record["event"] == event:
            place = max(free, record["time"])
            free = place + 2 * POINT  # two, for rounding
            yield record, place


def _arrows(
    records: Sequence[Event],
    lanes: dict[str, list[_Lane]],
    timeline: Timeline,
    numbers: dict[str, int],
    begin: float,
) -> Iterator[Event]:
    """ticket -> group -> batch of each trained group, and batch -> step of each batch."""
    laid = {(group.group_id, group.attempt): (role, group) for role, some in lanes.items() for group in some}
    of_group = {group_id: found for (group_id, _), found in sorted(laid.items(), key=lambda item: item[0])}
    replay = numbers["replay-0"]
    for record, place in _drawn(records, "tickets"):
        for key in map(tuple, record["tickets"]):
            if key in laid:
                role, group = laid[key]
                flow = f"ticket {key[0]}.{key[1]}"
                yield _flow("s", "ticket", flow, (replay, LANES), place - begin)
                yield _flow("f", "ticket", flow, (numbers[role], LANES + group.lane), group.begin - begin)
    batches = list(_drawn(records, "batch"))
    for record, place in batches:
        for group_id in record.get("group_ids", ()):
            if group_id in of_group:
                role, group = of_group[group_id]
                flow = f"group {record['step']}.{group_id}"
                yield _flow("s", "group", flow, (numbers[role], LANES + group.lane), group.end - begin)
                yield _flow("f", "group", flow, (replay, STATE), place - begin)
    yield from _steps(batches, timeline, numbers, begin)


def _steps(
    batches: Sequence[tuple[Event, float]], timeline: Timeline, numbers: dict[str, int], begin: float
) -> Iterator[Event]:
    """batch -> step: where the learner has waited for the batch no longer. The same step may come again."""
    learner = timeline.learner
    if learner is None:
        return
    waits = [phase.end for phase in learner.phases(learner.begin, learner.last) if phase.name == "wait"]
    for number, (record, place) in enumerate(batches):
        index = bisect.bisect_left(waits, place)
        if index < len(waits):
            flow = f"batch {record['step']}.{number}"
            yield _flow("s", "batch", flow, (numbers["replay-0"], STATE), place - begin)
            yield _flow("f", "batch", flow, (numbers["learner-0"], STATE), waits[index] - begin)


def _points(path: Path, numbers: dict[str, int], begin: float) -> Iterator[Event]:
    """What happened once and is no slice: a worker that left, a version that was announced, a restart."""
    number = numbers[path.stem]
    yield _name(number, "thread_name", "events", POINTS)
    for record in read_events(path):
        if "phase" in record or record["event"] in _DRAWN_OTHERWISE:
            continue
        arguments = {key: value for key, value in record.items() if key not in ("time", "role", "event")}
        yield {
            "name": record["event"],
            "ph": "i",
            "s": "t",
            "pid": number,
            "tid": POINTS,
            "ts": round((record["time"] - begin) * 1e6, 1),
            "args": arguments,
        }


def _counters(run_folder: Path, numbers: dict[str, int], begin: float) -> Iterator[Event]:
    number = numbers.get("learner-0")
    if number is None:
        return
    for row in read_metrics(run_folder):
        for name in COUNTERS:
            if name != "buffer/groups" and isinstance(row.get(name), int | float):
                yield _counter(name, number, row["time"] - begin, row[name])


def _slice(name: str, place: _Place, begin: float, seconds: float, arguments: dict[str, Any] | None = None) -> Event:
    """`begin` in seconds since the run's. Both ends are rounded, so that slices that meet do not come to overlap."""
    first, last = round(begin * 1e6), round((begin + seconds) * 1e6)
    event = {"name": name, "ph": "X", "pid": place[0], "tid": place[1], "ts": first, "dur": last - first}
    return {**event, **({"args": arguments} if arguments else {})}


def _flow(kind: str, name: str, identity: str, place: _Place, seconds: float) -> Event:
    """The begin ("s") or end ("f") of an arrow, at the slice of that place which encloses the instant."""
    event = {"name": name, "cat": name, "ph": kind, "id": identity, "pid": place[0], "tid": place[1]}
    return {**event, "ts": round(seconds * 1e6), **({"bp": "e"} if kind == "f" else {})}


def _counter(name: str, number: int, seconds: float, value: float) -> Event:
    return {"name": COUNTERS[name], "ph": "C", "pid": number, "ts": round(seconds * 1e6, 1), "args": {name: value}}


def _name(number: int, what: str, text: str, thread: int = 0) -> Event:
    """Metadata: how a process or a thread is called."""
    return {"name": what, "ph": "M", "pid": number, "tid": thread, "args": {"name": text}}

"""The parts of a model, read and fitted from what a run recorded: journal, events and metrics.

| part | from | how |
|---|---|---|
| answers | groups of the journal | as they are |
| server | begins and ends of groups and updates | searched: given the recorded begins, it ends as recorded |
| update | span `publish.apply` | a line over the tickets that were open |
| learner | metrics `time/` and `tokens/trained` | a line over the tokens |
| the small rest | spans and events | medians |
"""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from streamrl.config import Config
from streamrl.config.file import ConfigError
from streamrl.config.generate import GenerateConfig
from streamrl.generate.request_placement import Placement
from streamrl.lab.simulate.figures import WARM_UP
from streamrl.lab.simulate.fit import least, positive_line
from streamrl.lab.simulate.model import Answers, Line, Model, RecordedGroup, deviations
from streamrl.lab.simulate.pools import check_pools
from streamrl.lab.simulate.server import RECOMPUTING, Done, ServerSpeed
from streamrl.lab.simulate.site import make_server, places_of
from streamrl.observe.events import events_by_time
from streamrl.observe.metrics import read_metrics
from streamrl.places import load_run
from streamrl.recorded.journal import RunJournal
from streamrl.types import Group, PolicyVersion

SAMPLES = 4000  # of each run that the search replays: more make it slow, and change little
CALLS = 420  # of the search, for six numbers
FEWEST = 16  # groups of a server with which it can be fitted

# Servers that a finished run attached to are another one's by now, and so is the router before them.
ALONE = ("generate.attach=[]", "generate.router=null")

_WORKER = re.compile(r"generator-(\d+)")


@dataclass(frozen=True, slots=True)
class Served:
    """A group as its worker saw it. Times in seconds since the epoch."""

    begin: float
    end: float
    lengths: tuple[int, ...]
    version: float = 0.0  # mean step of the versions of its tokens


@dataclass(frozen=True, slots=True)
class Update:
    """A server took in a version."""

    begin: float
    seconds: float
    tickets: int  # that its worker had open
    version: int = 0
    server: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """What one server did in one run."""

    served: Sequence[Served]
    updates: Sequence[Update]
    places: int | None = None  # requests at once, where the capacity is counted in them


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run folder says."""

    folder: Path
    config: Config
    records: list[dict[str, Any]]
    groups: list[Group]
    rows: list[dict[str, Any]]


def calibrate(run_folders: Sequence[Path]) -> Model:
    """The model of recorded runs on the same machines, of which the first counts most.

    Runs that differ in what was in flight tell apart what a decoding step costs from what a sample of it costs.
    Raises ConfigError where they recorded too little.
    """
    runs = [_read(folder) for folder in run_folders]
    own = runs[0]
    rows = [row for run in runs if learner_kind(run.config) == learner_kind(own.config) for row in run.rows[WARM_UP:]]
    records = [record for run in runs for record in run.records]
    return Model(
        answers=Answers(tuple(sorted((_as_recorded(group) for group in own.groups), key=lambda group: group.step))),
        server=fit_server([_observed(run) for run in runs], _max_running(own.config), own.config.publish.interruption),
        update=_update_line(runs),
        learner=learner_line(rows),
        copy=_low([row["time/publish"] for row in rows if row["time/publish"] > 0]),
        announce=_gap(_ends(own.records, "learner.offer", "version"), _begins(own.records, "publish", "version")),
        transfer=_transfer(own.records),
        hand_out=_hand_out(own.records, own.groups),
        delivery=_gap(_points(own.records, "batch", "step"), _ends(own.records, "learner.wait", "step")),
        longest=max(cuts(own.config)),
        save=_low(saves(records)),
        ess_decay=_ess_decay(rows),
        clipped_growth=_growth(rows, "offpolicy/clipped"),
        masked_growth=_growth(rows, "offpolicy/masked"),
    )


def learner_kind(config: Config) -> tuple[int, int]:
    """Ranks and micro batch, in tokens: learners that differ in them say nothing of each other's speed."""
    return config.learner.ranks, config.learner.tokens_per_micro_batch


def cuts(config: Config) -> list[int]:
    """Tokens at which each pool cuts an answer, or a turn of one."""
    return [pool.sampling.max_new_tokens for pool in config.generate.each_pool]


def saves(records: Iterable[dict[str, Any]]) -> list[float]:
    """Seconds of each checkpoint."""
    return [record["seconds"] for record in records if _is(record, "learner.save", "end")]


def _read(folder: Path) -> _Run:
    config = load_run(folder, ALONE)
    check_pools(config, config, f"{folder}: ")
    rows = list(read_metrics(folder))
    if len(rows) <= WARM_UP + 1:
        raise ConfigError(f"{folder}: {len(rows)} learner steps are too few to calibrate; allowed: above {WARM_UP + 1}")
    return _Run(folder, config, list(events_by_time(folder)), list(recorded_groups(folder)), rows)


def _observed(run: _Run) -> Observed:
    """The fullest server of the worker that gave most groups, from the learner's first step on."""
    begun = next((record["time"] for record in run.records if record["event"] == "learner.step"), 0.0)
    of_workers = by_worker(run.groups)
    worker = max(of_workers, key=lambda name: len(of_workers[name]), default="")
    own, updates = _own(run.config, worker), updates_of(run.records).get(worker, [])
    of_servers = {
        name: [group for group in served if group.begin >= begun]
        for name, served in by_server(of_workers.get(worker, ()), server_names(own.servers, updates)).items()
    }
    server = max(of_servers, key=lambda name: len(of_servers[name]))
    if len(of_servers[server]) < FEWEST:
        raise ConfigError(
            f"{run.folder}: the journal holds the answers of {len(run.groups)} groups, too few to calibrate; "
            f"allowed: {FEWEST} of one server after the first step (journal.keep=all keeps them)"
        )
    places = places_of(run.config, own, _max_running(run.config))
    return Observed(of_servers[server], [each for each in updates if each.server == server], places)


def _own(config: Config, worker: str) -> GenerateConfig:
    """The settings of a worker by its name; one of another name is not the run's own, and counts as the first."""
    named = _WORKER.match(worker)
    return config.of_worker(int(named[1]) if named else 0).generate


def recorded_groups(run_folder: Path) -> Iterable[Group]:
    """Every group in the journal, in the order of completion."""
    journal = RunJournal(run_folder)
    journal.warn()
    return (journal.load(group) for group in journal.groups)


def by_worker(groups: Iterable[Group]) -> dict[str, list[Served]]:
    """By worker, in the order of their begins; groups without a token say nothing."""
    served: dict[str, list[Served]] = defaultdict(list)
    for group in groups:
        if group.tokens:
            versions = sum(int(sample.token_steps().sum()) for sample in group.samples) / group.tokens
            served[group.worker].append(Served(group.started, group.finished, group.lengths, versions))
    return {worker: sorted(each, key=lambda group: group.begin) for worker, each in served.items()}


def server_names(servers: int, updates: Iterable[Update]) -> list[str]:
    """The names of a worker's servers: those of the updates, and others for servers that had none."""
    names = sorted(name for name, _ in Counter(update.server for update in updates).most_common(servers))
    return [*names, *(f"without updates {number}" for number in range(servers - len(names)))]


def by_server(served: Sequence[Served], names: Sequence[str]) -> dict[str, list[Served]]:
    """The groups of a worker by the server that had them: that is not recorded, and follows from the worker's rule."""
    placement, found = Placement(), {name: list[Served]() for name in names}
    open_groups: list[tuple[float, int]] = []
    for number, group in enumerate(served):
        while open_groups and open_groups[0][0] <= group.begin:
            placement.end(heapq.heappop(open_groups)[1])
        found[placement.choose(number, names)].append(group)
        heapq.heappush(open_groups, (group.end, number))
    return found


def updates_of(records: Iterable[dict[str, Any]]) -> dict[str, list[Update]]:
    """The updates of each worker's servers, in order."""
    updates: dict[str, list[Update]] = defaultdict(list)
    for record in records:
        if _is(record, "publish.apply", "end") and "error" not in record:
            begin = record["time"] - record["seconds"]
            version = PolicyVersion.parse(record["version"]).step
            tickets = record.get("tickets", 0)
            updates[record["role"]].append(Update(begin, record["seconds"], tickets, version, record["server"]))
    return dict(updates)


# -- the server


def fit_server(observed: Sequence[Observed], max_running: int, interruption: str = "retract") -> ServerSpeed:
    """The speed with which a server ends these groups when they ended, with the versions that they had.

    The search begins three times, with most of the time in the decoding steps, in their samples, and in what halts a
    server, since it may find no way from one of these to the other; the best of them goes on. What a sample costs as it
    begins and as it ends is taken for the same: the ends alone do not tell one from the other.
    """
    windows = [_middle(each) for each in observed]
    recomputes = interruption in RECOMPUTING and any(window.updates for window in windows)

    def speed(numbers: Sequence[float]) -> ServerSpeed:
        step, sample, prefill, halted, latency = numbers[:5]
        again = numbers[5] if recomputes else 0.0
        return ServerSpeed(step, sample, prefill, halted, halted, again, latency, max_running)

    def error(numbers: list[float]) -> float:
        return sum(_error(speed(numbers), window) for window in windows)

    begins = [_guess(windows[0], shares)[: 6 if recomputes else 5] for shares in SHARES]
    found = min((least(error, begin, CALLS // 6) for begin in begins), key=error)
    return speed(least(error, found, CALLS // 2, spread=0.3))


# Of a server's time, with which the search begins: decoding steps, samples of them, what halts it.
SHARES = ((0.6, 0.2, 0.2), (0.1, 0.7, 0.2), (0.1, 0.2, 0.7))


def _guess(window: Observed, shares: tuple[float, float, float]) -> list[float]:
    """Numbers that would use up the window's time in these shares."""
    tokens = sum(sum(group.lengths) for group in window.served)
    samples = sum(len(group.lengths) for group in window.served)
    seconds = max(group.end for group in window.served) - window.served[0].begin
    typical = median(group.end - group.begin for group in window.served)
    at_once = max(1.0, samples * typical / seconds)  # Little's law
    decoding, each, halted = (share * seconds for share in shares)
    prefill, work = halted / len(window.served) / 4, halted / samples / 4  # two of each
    return [decoding / tokens * at_once, each / tokens, prefill, work, 2e-3, 1e-5]


def _error(speed: ServerSpeed, window: Observed) -> float:
    """How far ends, in typical times of a group, and versions, in steps, are off: both matter, and both on average."""
    served = window.served
    typical = median(group.end - group.begin for group in served)
    # What was under way before the first of them is not known: it is not counted until that has ended.
    settled = min(served[0].end, served[len(served) // 2].begin)
    pairs = [
        (after, group) for after, group in zip(replayed(speed, window), served, strict=True) if group.begin >= settled
    ]
    late = [(after[0] - group.end) / typical for after, group in pairs]
    newer = [after[1] - group.version for after, group in pairs] if window.updates else [0.0]
    return sum((sum(map(abs, off)) + abs(sum(off))) / len(off) for off in (late, newer))


def replayed(speed: ServerSpeed, window: Observed) -> list[tuple[float, float]]:
    """For each group when a server of this speed would end it, given its begin, and the mean version of its tokens."""
    served, updates = window.served, window.updates
    server = make_server(speed, window.places, updates[0].version - 1 if updates else 0)
    first, outcome = served[0].begin, dict[int, tuple[float, float]]()

    def record(done: Sequence[Done]) -> None:
        for each in done:
            steps = sum(version * (end - begin) for spans in each.spans for version, begin, end in spans)
            outcome[each.group_id] = first + each.time, steps / sum(served[each.group_id].lengths)

    begins = [(group.begin - first, 0, index) for index, group in enumerate(served)]
    for time, kind, index in sorted([*begins, *((each.begin - first, 1, i) for i, each in enumerate(updates))]):
        record(server.advance(time))
        if kind == 0:
            server.start(index, served[index].lengths, time)
        else:
            server.update(updates[index].version, updates[index].seconds)
    while math.isfinite(due := server.next_change):
        record(server.advance(due))
    return [outcome[index] for index in range(len(served))]


def _middle(observed: Observed) -> Observed:
    """As many groups as the search can afford, from the middle of the run, and the updates meanwhile."""
    served = observed.served
    count = min(len(served), max(FEWEST, SAMPLES // max(1, len(served[0].lengths))))
    first = (len(served) - count) // 2
    chosen = served[first : first + count]
    last = max(group.end for group in chosen)
    meanwhile = [each for each in observed.updates if chosen[0].begin <= each.begin <= last]
    return replace(observed, served=chosen, updates=meanwhile)


def _max_running(config: Config) -> int:
    given = config.generate.sglang_arguments
    return int(given.get("max_running_requests", ServerSpeed.__dataclass_fields__["max_running"].default))


# -- the other parts


def learner_line(rows: Sequence[dict[str, Any]]) -> Line:
    """Seconds of a step against its trained tokens."""
    tokens = [float(row["tokens/trained"]) for row in rows]
    seconds = [row["time/step"] - row["time/wait"] - row["time/publish"] for row in rows]
    fixed, each = positive_line(tokens, seconds)
    return Line(fixed, each, deviations(seconds, [fixed + each * amount for amount in tokens]))


def _update_line(runs: Sequence[_Run]) -> Line:
    """Seconds of an update against the samples that the server had: its part of those of its worker."""
    samples, seconds = list[float](), list[float]()
    for run in runs:
        for worker, updates in updates_of(run.records).items():
            own = _own(run.config, worker)
            samples += [update.tickets * own.group_size / own.servers for update in updates]
            seconds += [update.seconds for update in updates]
    fixed, each = positive_line(samples, seconds)
    return Line(fixed, each, deviations(seconds, [fixed + each * amount for amount in samples]))


def _transfer(records: Sequence[dict[str, Any]]) -> float:
    """What a publish takes besides the server's own part."""
    whole = {_server(record): record["seconds"] for record in records if _is(record, "publish", "end")}
    inside = {_server(record): record["seconds"] for record in records if _is(record, "publish.apply", "end")}
    rest = [whole[key] - inside[key] for key in whole.keys() & inside.keys()]
    return max(0.0, median(rest)) if rest else 0.0


def _hand_out(records: Sequence[dict[str, Any]], groups: Sequence[Group]) -> float:
    """From a version's acknowledgement to the next begin of a group, where one was waiting for it."""
    begins = sorted(group.started for group in groups)
    waits = []
    for record in records:
        if record["event"] == "publish.acknowledged" and (place := bisect_right(begins, record["time"])) < len(begins):
            waits.append(begins[place] - record["time"])
    return median(waits) if waits else 0.0


def _ess_decay(rows: Sequence[dict[str, Any]]) -> float:
    pairs = [(row.get("offpolicy/ess"), row["staleness/mean"]) for row in rows]
    logs = [(-math.log(min(1.0, ess)), age) for ess, age in pairs if ess and ess > 0]
    ages = sum(age for _, age in logs)
    return sum(log for log, _ in logs) / ages if ages > 0 else 0.0


def _growth(rows: Sequence[dict[str, Any]], name: str) -> float:
    """By how much a share grows with each step of mean staleness."""
    pairs = [(row[name], row["staleness/mean"]) for row in rows if row.get(name) is not None]
    ages = sum(age for _, age in pairs)
    return sum(share for share, _ in pairs) / ages if ages > 0 else 0.0


def _as_recorded(group: Group) -> RecordedGroup:
    oldest = group.oldest
    return RecordedGroup(
        step=oldest.step if oldest else 0,
        lengths=group.lengths,
        rewards=tuple(sample.reward for sample in group.finals),
        passed=tuple(sample.passed for sample in group.finals),
        trained=tuple(sum(int(np.count_nonzero(each.loss_mask)) for each in rollout) for rollout in group.rollouts),
    )


# -- reading


def _is(record: dict[str, Any], event: str, phase: str) -> bool:
    return record["event"] == event and record.get("phase") == phase


def _server(record: dict[str, Any]) -> tuple[str, str]:
    return str(record["server"]), str(record["version"])


def _points(records: Iterable[dict[str, Any]], event: str, key: str) -> dict[Any, float]:
    return {record[key]: record["time"] for record in records if record["event"] == event}


def _begins(records: Iterable[dict[str, Any]], event: str, key: str) -> dict[Any, float]:
    """The first begin for each value of the key."""
    found: dict[Any, float] = {}
    for record in records:
        if _is(record, event, "begin"):
            found.setdefault(record[key], record["time"])
    return found


def _ends(records: Iterable[dict[str, Any]], event: str, key: str) -> dict[Any, float]:
    return {record[key]: record["time"] for record in records if _is(record, event, "end")}


def _gap(before: dict[Any, float], after: dict[Any, float]) -> float:
    """Median seconds from one to the other."""
    gaps = [after[key] - before[key] for key in before.keys() & after.keys()]
    return max(0.0, median(gaps)) if gaps else 0.0


def _low(values: Sequence[float]) -> float:
    """The tenth percentile: what it takes where nothing had to be waited for."""
    ordered = sorted(values)
    return ordered[len(ordered) // 10] if ordered else 0.0

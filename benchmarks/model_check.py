"""Random schedules of a whole run in simulated time: what breaks the bound, the order, exactly once, or hangs?

    python -m benchmarks.model_check                   2,000 schedules
    python -m benchmarks.model_check --quick           200
    python -m benchmarks.model_check --seed 17 -n 1    one of them again

Real are the replay service with its durable journal, the publisher, the learner's batch source, both peers' way to
introduce themselves again, and the fleet's choice of servers; benchmarks/model_worker.py and model_learner.py drive
them by hand. Each schedule draws a configuration, and then, tick by tick, what happens: service, learner, workers and
servers die at any moment, the end of the journal is cut off while the service is down, connections lose what is under
way, the service is stopped for longer than a lease, publishes fail with the old weights whole or in parts, groups are
filtered, quarantined, or late for ever. Then the faults stop, and the run must complete within LIMIT simulated seconds.

Judged is what was trained, in the history that the last checkpoint leaves: no token older than the bound, the order of
the ids, every prompt exactly once, a step that is trained again made of the same groups. Exit code 1 for any finding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

from benchmarks.faults import _out_of_order
from benchmarks.model_learner import LearnerModel
from benchmarks.model_network import Wire, World
from benchmarks.model_worker import WorkerModel
from streamrl.config import Config
from streamrl.lab.output import output_file
from streamrl.learner import batches
from streamrl.publish import publisher
from streamrl.replay.orders import make_order
from streamrl.replay.service import Service
from streamrl.stream import peer
from streamrl.types import Batch

SCHEDULES, QUICK = 2000, 200
TICK = 0.1  # simulated seconds between two looks
LIMIT = 900.0  # simulated seconds in which a run completes once nothing fails any more
STEPS = 20
WORKERS = 2
RUN = "model-check"
RESTART = (0.5, 4.0)  # simulated seconds from a crash to the next start
TAIL = 3000  # bytes at the end of the journal that may be cut off

# How often each fault comes, in times a simulated minute; a schedule has each of them more, less or not at all.
FAULTS = {"service": 4.0, "learner": 4.0, "worker": 4.0, "server": 4.0, "connection": 20.0, "pause": 1.0}


@dataclass(frozen=True)
class Trained:
    """One step of the surviving history."""

    step: int
    ids: tuple[int, ...]
    prompts: tuple[tuple[str, int], ...]
    digest: tuple[tuple[int, float], ...]  # tells two generations of a group apart


@dataclass
class Finding:
    """What became of one schedule."""

    seed: int
    problem: str = ""  # empty: everything held
    seconds: float = 0.0  # simulated, to the end of the run
    recovered: float = 0.0  # simulated, from the last fault to the end
    counts: dict[str, int] = field(default_factory=dict)  # of faults, and of what followed
    steps: int = 0  # trained, repetitions included


class Schedule:
    """One run, drawn from its seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.folder = folder
        self.config = draw_config(self.chance, folder)
        self.bound = make_order(self.config.replay, self.config.publish.every).worst_staleness
        self.world = World(self.chance, RUN)
        self.world.failing = self.chance.choice([0.0, 0.1, 0.3, 0.6])
        self.world.checkpoint_every = self.chance.choice([1, 2, 3, 5])
        self.world.trains = self._trains
        self.rates = {name: rate * self.chance.choice([0, 0.5, 1, 2]) * TICK / 60 for name, rate in FAULTS.items()}
        self.cuts = self.config.journal.keep != "none" and self.chance.random() < 0.4
        self.history: list[Trained] = []
        self.before: dict[int, Trained] = {}  # every step as it was trained last
        self.trained = 0
        self.problem = ""
        self.service: Service | None = None
        self.learner: LearnerModel | None = None
        self.workers: list[WorkerModel | None] = [None] * WORKERS
        self.due: dict[str, float] = {}  # when who is down is started again
        self.paused = 0.0  # until when the service is stopped

    def run(self) -> Finding:
        """To the end of the run, or to the first finding."""
        faults = self.chance.uniform(10.0, 60.0)
        began, clock = self.world.time.now, self.world.time
        stopped = began
        with simulated(self.world):
            self._start("service")
            while not self.problem and not self._is_over():
                clock.now += TICK
                if self.world.faulty:
                    self._fault()
                    stopped = clock.now
                    finished = self.learner is not None and self.learner.finished
                    self.world.faulty = clock.now < began + faults and not finished
                self._turn()
                if clock.now - stopped > LIMIT:
                    self.problem = f"no progress at step {self._step()} of {STEPS}"
            self._close()
        if not self.problem:
            self.problem = self._judge()
        self.world.counts["words lost"] = self.world.ends.lost
        now = clock.now
        return Finding(self.seed, self.problem, now - began, now - stopped, self.world.counts, self.trained)

    # -- what happens

    def _turn(self) -> None:
        """Everyone who is there acts once, in any order."""
        now = self.world.time.now
        for name in [name for name, due in self.due.items() if due <= now]:
            del self.due[name]
            self._start(name)
        if self.learner is None and "learner" not in self.due:
            self._start("learner")
        for index, worker in enumerate(self.workers):
            if worker is None and f"worker-{index}" not in self.due:
                self._start(f"worker-{index}")
        acts = [worker.act for worker in self.workers if worker is not None]
        if self.learner is not None:
            acts.append(self.learner.act)
        if self.service is not None and now >= self.paused:
            acts.append(self._serve)
        self.chance.shuffle(acts)
        for act in acts:
            act()

    def _serve(self) -> None:
        assert self.service is not None
        if not self.service.turn() and self.service.core.code != 0:
            self.problem = "the service ended the run"

    def _start(self, name: str) -> None:
        if name == "service":
            wire = Wire(self.world.ends.lines, self.chance)
            clock = self.world.time.monotonic
            self.service = Service(self.config, self.folder, self.world.events, router=wire, clock=clock)  # type: ignore[arg-type]
        elif name == "learner":
            self.learner = LearnerModel(self.config, self.folder, self.world)
            self.world.incarnations += 1
        else:
            index = int(name.rpartition("-")[2])
            self.workers[index] = WorkerModel(self.config, self.folder, index, self.world)

    def _fault(self) -> None:
        for name, rate in self.rates.items():
            if self.chance.random() < rate:
                self._strike(name)

    def _strike(self, name: str) -> None:
        later = self.world.time.now + self.chance.uniform(*RESTART)
        worker = self.chance.randrange(WORKERS)
        match name:
            case "service" if self.service is not None:
                self._kill_service()
                self.due["service"] = later
            case "learner" if self.learner is not None:
                self.learner.dies()
                self.learner = None
                step = self.world.checkpoints[-1].step
                self.history = [trained for trained in self.history if trained.step < step]
                self.due["learner"] = later
            case "worker" if (victim := self.workers[worker]) is not None:
                victim.dies()
                self.workers[worker] = None
                self.due[f"worker-{worker}"] = later
            case "server" if (victim := self.workers[worker]) is not None:
                victim.server_dies()
            case "connection":
                self.world.ends.breaks()
            case "pause":
                self.paused = self.world.time.now + self.chance.uniform(1.0, 6.0)
            case _:
                return
        self.world.count(name)

    def _kill_service(self) -> None:
        """What it had in memory is gone, and a part of what was under way to and from it."""
        assert self.service is not None
        self.service._durable.close()
        self.service = None
        for line in self.world.ends.lines.values():
            for _ in range(self.chance.randint(0, len(line.up))):
                line.up.popleft()
            for _ in range(self.chance.randint(0, len(line.down))):
                line.down.pop()
        if self.cuts and self.chance.random() < 0.5:
            segment = max((self.folder / "journal").glob("*.journal"))
            os.truncate(segment, max(0, segment.stat().st_size - self.chance.randrange(1, TAIL)))
            self.world.count("journal cut")

    def _trains(self, batch: Batch) -> None:
        """The learner trains a step: what it is made of, and how old."""
        self.trained += 1
        groups = batch.groups
        trained = Trained(
            batch.step,
            tuple(group.group_id for group in groups),
            tuple((group.task, group.prompt_index) for group in groups),
            tuple((group.attempt, group.finished) for group in groups),
        )
        former = self.before.get(batch.step)
        if former is not None:
            self.world.count("trained again")
            if not self.cuts and self.config.journal.keep != "none" and former != trained:
                self.problem = f"step {batch.step} is made of other groups than before: {former} {trained}"
        self.before[batch.step] = trained
        self.history.append(trained)
        self._check_age(batch)

    def _check_age(self, batch: Batch) -> None:
        spans = [span for sample in batch.samples for span in sample.spans]
        oldest = min((span.version.step for span in spans), default=batch.step)
        if self.bound is not None and batch.step - oldest > self.bound:
            self.problem = f"step {batch.step} trains tokens of step {oldest}, the bound is {self.bound}"

    # -- what must hold

    def _step(self) -> int:
        return self.learner.version.step if self.learner is not None else -1

    def _is_over(self) -> bool:
        return self.learner is not None and self.learner.ended

    def _judge(self) -> str:
        """The surviving history against the ledger of the weights; empty where they agree."""
        assert self.learner is not None
        ids = [group_id for step in self.history for group_id in step.ids]
        prompts = Counter(prompt for step in self.history for prompt in step.prompts)
        ledger = self.learner._source.ledger
        assert ledger is not None
        settled = {*range(ledger.below), *ledger.above}
        asked = {(task, index) for task, cursor in ledger.cursors.items() for index in range(cursor)}
        skipped = asked - prompts.keys() - set(ledger.pending.values())
        findings = {
            "steps missing or out of turn": [step.step for step in self.history] != list(range(STEPS)),
            "a prompt twice": max(prompts.values()) > 1,
            "a group twice": len(set(ids)) != len(ids),
            "a group lost, or not in the ledger": settled != set(ids),
            "a prompt left out": bool(skipped) and not self.config.replay.filter.active,
            "out of order": _out_of_order(ids, make_order(self.config.replay)) > 0,
        }
        return "; ".join(what for what, found in findings.items() if found)

    def _close(self) -> None:
        if self.service is not None:
            self.service._durable.close()


def draw_config(chance: random.Random, folder: Path) -> Config:
    """A small run with short patience."""
    order = chance.choice(["fifo", "fifo", "windowed", "synchronous", "ready"])
    groups, staleness = chance.randint(1, 3), chance.choice([0, 1, 2, 1.5])
    bound = 0 if order == "synchronous" else staleness
    slots = int((bound + 1) * groups)
    window = chance.randint(1, slots - groups + 1) if order == "windowed" else 1
    every = chance.randint(1, (slots - window + 1) // groups)
    return Config.model_validate(
        {
            "run": {
                "id": RUN,
                "name": folder.name,
                "folder": folder.parent,
                "steps": STEPS,
                "silence_timeout": 1e6,
                "progress_timeout": 1e6,
                "start_timeout": 300.0,
                "stop_timeout": 2.0,
            },
            "generate": {
                "workers": WORKERS,
                "servers": chance.randint(1, 2),
                "attach": [f"http://127.0.0.1:{port}" for port in range(1, 2 * WORKERS + 1)],
                "group_size": 2,
                "groups_in_flight": chance.randint(1, 6),
                "heartbeat": 0.5,
            },
            "stream": {"reply_timeout": 3.0},
            "replay": {
                "order": order,
                "window": window,
                "groups_per_step": groups,
                "max_staleness": staleness,
                "lease": 2.0,
                "group_timeout": 20.0,
                "max_attempts": chance.choice([2, 5, 1000]),
                "filter": {"signal": chance.random() < 0.3, "tries": 3},
                "release": chance.choice(["eager", "just_in_time"]),
            },
            "publish": {"timeout": 4.0, "transport": "memory", "every": every},
            "journal": {"keep": chance.choice(["resume", "resume", "all", "none"]), "segment": 1 << 13},
            "learner": {"tick": 0.2},
        }
    )


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """The modules that ask for the time, for a connection, or for a thread, get the world's."""
    threads = types.SimpleNamespace(Lock=threading.Lock, Condition=threading.Condition, Thread=mock.Mock())
    with contextlib.ExitStack() as stack:
        for module in (publisher, peer, batches):
            stack.enter_context(mock.patch.object(module, "time", world.time))
        stack.enter_context(mock.patch.object(peer, "Dealer", world.ends))
        stack.enter_context(mock.patch.object(publisher, "threading", threads))
        stack.enter_context(mock.patch.object(publisher, "make_staging", mock.Mock()))
        yield


def check(seed: int) -> Finding:
    """One schedule, in a folder of its own."""
    logging.disable(logging.CRITICAL)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # an fsync there costs nothing
    with tempfile.TemporaryDirectory(dir=memory) as temporary:
        try:
            finding = Schedule(seed, Path(temporary) / "run").run()
        except Exception as error:  # the policy of the check: a schedule that breaks a role is a finding
            finding = Finding(seed, f"{type(error).__name__}: {error}")
        finally:
            logging.disable(logging.NOTSET)
    return finding


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--schedules", type=int, help=f"how many (default: {SCHEDULES}, with --quick {QUICK})")
    parser.add_argument("--quick", action="store_true", help="fewer schedules")
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others follow")
    parser.add_argument("--json", type=output_file, help="write the figures here")
    options = parser.parse_args()
    schedules = options.schedules or (QUICK if options.quick else SCHEDULES)
    began, findings = time.monotonic(), []
    for finding in map(check, range(options.seed, options.seed + schedules)):
        findings.append(finding)
        if finding.problem:
            print(f"seed {finding.seed}: {finding.problem}", flush=True)
    figures = summary(findings, time.monotonic() - began)
    _print(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if figures["broken"] else 0


def summary(findings: Sequence[Finding], seconds: float) -> dict[str, object]:
    """The figures of the table and of the JSON."""
    counts: Counter[str] = Counter()
    for finding in findings:
        counts.update(finding.counts)
    return {
        "schedules": len(findings),
        "seconds": seconds,
        "simulated_hours": sum(finding.seconds for finding in findings) / 3600,
        "steps": sum(finding.steps for finding in findings),
        "longest_recovery": max((finding.recovered for finding in findings), default=0.0),
        "counts": dict(sorted(counts.items())),
        "broken": [asdict(finding) for finding in findings if finding.problem],
    }


def _print(figures: dict[str, object]) -> None:
    counts, broken = figures["counts"], figures["broken"]
    assert isinstance(counts, dict)
    assert isinstance(broken, list)
    for name, count in counts.items():
        print(f"{name:>16} {count:8}")
    print(
        f"{figures['schedules']} schedules, {figures['steps']} steps trained, {figures['simulated_hours']:.1f} "
        f"simulated hours in {figures['seconds']:.0f} s; complete {figures['longest_recovery']:.0f} simulated s after "
        "the last fault at the latest"
    )
    told = "; ".join(f"seed {each['seed']}: {each['problem']}" for each in broken[:5])
    print(f"broken: {len(broken)} schedules: {told}" if broken else "broken: nothing")


if __name__ == "__main__":
    sys.exit(main())

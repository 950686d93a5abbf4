"""Processes killed by SIGKILL at random moments, journals damaged: what is lost, trained twice, reordered, too old?

    python -m benchmarks.faults --kills 200   scripted workers and learner (benchmarks/fault_roles.py), the real service
    python -m benchmarks.faults --real        the quickstart, with SGLang and Megatron-Core: benchmarks/faults_real.py

The scripted learner has no model. All else of it is the real one's: each batch goes through its quarantine, its plan
and its packing, and some groups are poison.

While the service is down the end of its journal is sometimes cut off or a bit of it flipped, beyond what a
kill can do: as a disk does that has lost what it had confirmed. What was lost with it is generated again, so that
the guarantees hold all the same; only that a step which is trained again has the same groups is asked of a journal
that has been whole since the checkpoint.
A recovery lasts from a kill to the first learner step that is trained after the process was started again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.fault_roles import Start, Trained, read_checkpoint, read_record, record_path
from streamrl.config import Config
from streamrl.config import file as config_file
from streamrl.lab.output import output_file, output_folder
from streamrl.observe.events import event_path, read_events
from streamrl.replay.orders import make_order
from streamrl.replay.orders.base import Order
from streamrl.types import Ledger

RECOVERY = 60.0  # seconds in which a run must train again after a kill
BETWEEN = (0.02, 0.6)  # seconds between two kills, where the second does not wait for the recovery from the first
WAITS = 0.7  # share of the kills after which the run is left alone until it trains again
DAMAGES = 0.6  # share of the service's kills that find the journal damaged
TAIL = 1 << 15  # bytes at the end of the newest segment that a damage may reach
LAST_STEPS = 5  # trained in peace at the end


@dataclass
class Process:
    """One of the processes of the run."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def kill(self) -> None:
        self.end(signal.SIGKILL)

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        try:
            return self.process.wait(RECOVERY)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass
class Verdict:
    """What the record shows; all of the first four are 0 where the guarantees hold."""

    lost: int = 0
    twice: int = 0
    reordered: int = 0
    broken: int = 0  # steps with a token beyond the bound
    steps: int = 0  # in the surviving history
    again: int = 0  # steps that were trained again after a restart
    compared: int = 0  # of these, with a journal that had been whole since the checkpoint
    placeholders: int = 0  # samples
    quarantined: int = 0  # groups in the surviving history
    refused: int = 0  # at the door of the service
    staleness: int = 0  # largest
    kills: Counter[str] = field(default_factory=Counter)
    damages: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)  # seconds

    @property
    def holds(self) -> bool:
        return not (self.lost or self.twice or self.reordered or self.broken)


class Chaos:
    """A run of scripted processes, and what is done to it."""

    def __init__(self, folder: Path, config: Config, seed: int) -> None:
        self.folder = folder
        self.config = config
        self.random = random.Random(seed)
        self.damaged: list[float] = []  # when, seconds since the epoch
        self.verdict = Verdict()
        roles = [sys.executable, "-m", "benchmarks.fault_roles"]
        replay = [sys.executable, "-m", "streamrl.cli", "replay", "--run-folder", str(folder)]
        self.service = self._process("replay", [*replay, "--lifeline", str(os.getpid())])
        self.learner = self._process("learner", [*roles, "learner", str(folder)])
        self.workers = [
            self._process(f"worker-{index}", [*roles, "worker", str(folder), str(index)])
            for index in range(config.workers)
        ]

    @property
    def processes(self) -> list[Process]:
        return [self.service, self.learner, *self.workers]

    def run(self, kills: int, say: Callable[[str], None]) -> Verdict:
        """Kill `kills` times, let the run come to rest, and judge its record. Raises TimeoutError, RuntimeError."""
        try:
            for process in self.processes:
                process.start()
            self._await_steps(1)
            for number in range(1, kills + 1):
                self._strike()
                if number % 20 == 0:
                    say(f"{number} kills, {self._steps()} steps trained")
            self._await_steps(LAST_STEPS)
            code = self.learner.end(signal.SIGTERM)
            if code:
                raise RuntimeError(f"the learner ended with {code}; see {self.learner.log}")
        finally:
            for process in self.processes:
                if process.process is not None and process.process.poll() is None:
                    process.kill()
        return judge(self.folder, self.config, self.damaged, self.verdict)

    def _strike(self) -> None:
        """Kill one process at some moment, start it again, and mostly wait until the run trains again."""
        time.sleep(self.random.uniform(*BETWEEN))
        victim = self.random.choice([self.service, self.learner, self.random.choice(self.workers)])
        self._check_alive()
        killed = time.monotonic()
        victim.kill()
        self.verdict.kills[victim.name.partition("-")[0]] += 1
        if victim is self.service and self.config.journal.keep != "none" and self.random.random() < DAMAGES:
            self._damage()
        victim.start()
        if self.random.random() < WAITS:
            self._await_steps(1)
            self.verdict.recoveries.append(time.monotonic() - killed)

    def _damage(self) -> None:
        """Cut the newest segment, or flip one of its bits, near its end."""
        segment = max((self.folder / "journal").glob("*.journal"))
        size, reach = segment.stat().st_size, self.random.randrange(1, TAIL)
        place = max(0, size - reach)
        if self.random.random() < 0.5:
            os.truncate(segment, place)
            self.verdict.damages["cut"] += 1
        elif size:
            with segment.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0] ^ 1 << self.random.randrange(8)
                file.seek(place)
                file.write(bytes([byte]))
            self.verdict.damages["flipped"] += 1
        self.damaged.append(time.time())

    def _steps(self) -> int:
        return record_path(self.folder).read_bytes().count(b'"Trained"') if record_path(self.folder).exists() else 0

    def _await_steps(self, more: int) -> None:
        """Until `more` steps are trained. Raises TimeoutError after RECOVERY, RuntimeError where a process ended."""
        wanted, deadline = self._steps() + more, time.monotonic() + RECOVERY
        while self._steps() < wanted:
            self._check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no learner step in {RECOVERY:g} s; see {self.folder}")
            time.sleep(0.01)

    def _check_alive(self) -> None:
        for process in self.processes:
            assert process.process is not None
            if process.process.poll() is not None:
                raise RuntimeError(f"{process.name} ended by itself; see {process.log}")

    def _process(self, name: str, command: list[str]) -> Process:
        return Process(name, command, self.folder / "logs" / f"{name}.log")


def judge(folder: Path, config: Config, damaged: list[float], verdict: Verdict) -> Verdict:
    """Compare the learner's record with what its last checkpoint says and what the order promises."""
    checkpoint = read_checkpoint(folder)
    ledger = (checkpoint.ledger if checkpoint else None) or Ledger()
    log = event_path(folder, "replay")
    verdict.refused = sum(event["event"] == "group.refused" for event in read_events(log)) if log.exists() else 0
    return judge_record(read_record(folder), ledger, config, damaged, verdict)


def judge_record(
    record: list[Start | Trained], ledger: Ledger, config: Config, damaged: list[float], verdict: Verdict
) -> Verdict:
    """The same of a record and the ledger of the last checkpoint. `damaged`: when something was, since the epoch."""
    history = surviving(record)
    ids = [group_id for step in history for group_id in step.group_ids]
    prompts = Counter(prompt for step in history for prompt in step.prompts)
    settled = {*range(ledger.below), *ledger.above}
    verdict.steps = len(history)
    gaps = sum(step.step != index for index, step in enumerate(history))
    verdict.lost = len(settled.difference(ids)) + len(_skipped(prompts, ledger)) + gaps
    verdict.twice = sum(count - 1 for count in itertools.chain(Counter(ids).values(), prompts.values()))
    verdict.twice += len(set(ids) - settled)  # trained, but the checkpoint would have them come again
    verdict.reordered = _out_of_order(ids, make_order(config.replay))
    for start, before, after in _trained_again(record):
        verdict.again += 1
        if config.journal.keep == "none" or any(start.checkpoint <= moment <= after.time for moment in damaged):
            continue
        verdict.compared += 1
        verdict.reordered += (before.group_ids, before.digests) != (after.group_ids, after.digests)
    bound = make_order(config.replay).worst_staleness
    verdict.broken = sum(bound is not None and step.step - step.oldest > bound for step in history)
    verdict.staleness = max((step.step - step.oldest for step in history), default=0)
    verdict.placeholders = sum(step.placeholders for step in history)
    verdict.quarantined = sum(len(step.quarantined) for step in history)
    return verdict


def surviving(record: list[Start | Trained]) -> list[Trained]:
    """The steps that are in the learner's weights at the end: a start takes back what its checkpoint does not have."""
    history: list[Trained] = []
    for line in record:
        if isinstance(line, Start):
            first = int(line.version.partition(".")[0])
            history = [step for step in history if step.step < first]
        else:
            history.append(line)
    return history


def _skipped(prompts: Counter[tuple[str, int]], ledger: Ledger) -> set[tuple[str, int]]:
    """Prompts below their task's cursor that were neither trained nor are out."""
    asked = {(task, index) for task, cursor in ledger.cursors.items() for index in range(cursor)}
    return asked - prompts.keys() - set(ledger.pending.values())


def _out_of_order(ids: list[int], order: Order) -> int:
    """Groups that were trained before an older one that they may not pass."""
    trained: set[int] = set()
    oldest = wrong = 0
    for group_id in ids:
        wrong += not order.allows(group_id, oldest)
        trained.add(group_id)
        while oldest in trained:
            oldest += 1
    return wrong


def _trained_again(record: list[Start | Trained]) -> Iterator[tuple[Start, Trained, Trained]]:
    """Every step that was trained again: the start that it follows, the former time, this time."""
    last: dict[int, Trained] = {}
    start = Start(version="0.0", checkpoint=0.0)
    for line in record:
        if isinstance(line, Start):
            start = line
            continue
        if line.step in last:
            yield start, last[line.step], line
        last[line.step] = line


def make_config(folder: Path, order: str, keep: str) -> Config:
    """Small groups and short patience: the run is about who dies when."""
    return Config.model_validate(
        {
            "run": {"name": folder.name, "folder": folder.parent, "steps": 1_000_000, "silence_timeout": RECOVERY},
            "generate": {"workers": 2, "group_size": 4, "groups_in_flight": 16, "heartbeat": 0.2},
            "stream": {"reply_timeout": 2.0},
            "replay": {
                "order": order,
                "window": 8 if order == "windowed" else 1,
                "groups_per_step": 8,
                "max_staleness": 2,
                "lease": 1.5,
                "max_attempts": 50,
            },
            "journal": {"keep": keep, "segment": 1 << 20},
            "learner": {"tick": 0.05, "tokens_per_micro_batch": 512},
            "publish": {"timeout": RECOVERY / 4},
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--order", choices=["fifo", "windowed"], default="fifo")
    parser.add_argument("--keep", choices=["none", "resume", "all"], default="resume", help="journal.keep")
    parser.add_argument("--seed", type=int, default=1, help="of victims, moments and damages")
    parser.add_argument("--folder", type=output_folder, help="keep the run folder here (default: a temporary one)")
    parser.add_argument("--json", type=output_file, help="write the figures here")
    parser.add_argument("--real", action="store_true", help="SGLang and Megatron-Core instead of scripted roles")
    parser.add_argument("--only", nargs="+", default=[], help="with --real: kills, or scenarios of fault_scenarios.py")
    options = parser.parse_args()
    if options.real:
        from benchmarks import faults_real

        return faults_real.run(options.folder, options.only, options.json)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary) / "run").absolute()
        (folder / "logs").mkdir(parents=True)
        config = make_config(folder, options.order, options.keep)
        config_file.save(config, folder / "config.yaml")
        verdict = Chaos(folder, config, options.seed).run(options.kills, lambda text: print(text, flush=True))
    _print(verdict)
    if options.json:
        options.json.write_text(json.dumps(vars(verdict), indent=1) + "\n")
    return 0 if verdict.holds else 1


def _print(verdict: Verdict) -> None:
    for what, counts in (("kills", verdict.kills), ("damages to the journal", verdict.damages)):
        print(f"{what}: {', '.join(f'{name} {count}' for name, count in sorted(counts.items())) or 'none'}")
    print(
        f"{verdict.steps} steps in the weights, {verdict.again} trained again, {verdict.compared} from a whole journal"
    )
    print(f"poison: refused at the door {verdict.refused}, quarantined by the learner {verdict.quarantined}")
    print(f"placeholder samples {verdict.placeholders}, largest staleness {verdict.staleness}")
    if verdict.recoveries:
        p50, largest = np.percentile(verdict.recoveries, 50), max(verdict.recoveries)
        print(f"recovery p50 {p50:.2f} s, max {largest:.2f} s, of {len(verdict.recoveries)}")
    print(
        f"lost {verdict.lost}, trained twice {verdict.twice}, reordered {verdict.reordered}, "
        f"bound broken {verdict.broken}"
    )


if __name__ == "__main__":
    raise SystemExit(main())

"""Faults that are forced on the real quickstart, one run each: `python -m benchmarks.faults --real`.

    no-journal   journal.keep=none, and the learner is killed behind its checkpoint: all that it had trained since
                 is generated again, by servers that are ahead of it
    frames       a bit of a group's frames flips that the killed learner needs again: this group is generated again
    poison       a foreign worker with the run's keys sends groups that no learner can train: some are refused at the
                 door; others come in, and the learner that is started with shorter rows must leave them out
    segments     rot in old segments of the journal, in frames of several groups of one step and in a record's head;
                 the service and the learner are killed
    checkpoint   a bit of the newest checkpoint flips, and the learner is killed: it goes on from the older one

A scenario counts only where what it forces was seen to happen.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fault_evidence import delivered, events, judge_run
from benchmarks.fault_poison import LONG, OUT_OF_VOCABULARY, ROW
from benchmarks.faults import Verdict
from benchmarks.quickstart_run import Quickstart
from streamrl.replay.history import read_journal
from streamrl.replay.records import Completed
from streamrl.replay.segments import segment_path
from streamrl.types import PolicyVersion

EVERY = 10  # steps between two checkpoints
BEHIND = 5  # steps behind a checkpoint at which something happens
STEPS = 40
SEGMENT = 1 << 17  # bytes: a step of the quickstart is some tens of thousands
IN_ONE_STEP = 3  # groups of one step whose frames rot


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    name: str
    verdict: Verdict
    forced: int  # how often what the scenario forces was seen
    code: int  # of `train`
    step: int
    steps: int
    audit: str  # "held", "BROKEN", or why there was none

    @property
    def holds(self) -> bool:
        complete = self.code == 0 and self.step == self.steps == self.verdict.steps
        return self.verdict.holds and complete and self.forced > 0 and self.audit != "BROKEN"

    def __str__(self) -> str:
        verdict = self.verdict
        return (
            f"{f'forced {self.forced}' if self.forced else 'NOT FORCED'}, {verdict.again} steps trained again, "
            f"quarantined {verdict.quarantined}: lost {verdict.lost}, trained twice {verdict.twice}, "
            f"reordered {verdict.reordered}, bound {'broken' if verdict.broken else 'unbroken'} "
            f"(staleness {verdict.staleness}), completed {self.step} of {self.steps} with exit code {self.code}, "
            f"audit {self.audit}"
        )


@dataclass(frozen=True)
class Scenario:
    """One fault."""

    name: str
    what: str
    run: Callable[[Path], Outcome]


def finish(
    run: Quickstart, seen: Callable[[Verdict], int], *, damaged: tuple[float, ...] = (), audited: bool = False
) -> Outcome:
    """Wait for the end of a run and judge it. `seen`: how often what it forces has happened."""
    code = run.wait()
    verdict = judge_run(run.folder, run.config, list(damaged))
    audit = _audit(run.folder) if audited else "left out"
    return Outcome(run.folder.name, verdict, seen(verdict), code, run.step(), run.steps, audit)


def _audit(folder: Path) -> str:
    command = [sys.executable, "-m", "streamrl.cli", "audit", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
    return "BROKEN" if done.returncode else "held"


def no_journal(place: Path) -> Outcome:
    with Quickstart(place, "no-journal", STEPS, f"checkpoint.every={EVERY}", "journal.keep=none") as run:
        run.start()
        run.reach(EVERY + BEHIND, checkpoint=EVERY)
        run.kill("learner")
        return finish(run, lambda verdict: verdict.again)


def frames(place: Path) -> Outcome:
    with Quickstart(place, "frames", STEPS, f"checkpoint.every={EVERY}", "journal.keep=resume") as run:
        run.start()
        step = run.reach(EVERY + BEHIND, checkpoint=EVERY)
        _rot(run.folder, delivered(run.folder, step - 1)[:1])
        damaged = run.kill("learner")
        return finish(run, lambda verdict: len(_lost(run.folder)), damaged=(damaged,))


def poison(place: Path) -> Outcome:
    settings = ("stream.curve=on", "publish.transport=disk", "replay.max_attempts=20", f"checkpoint.every={2 * EVERY}")
    with Quickstart(place, "poison", 2 * STEPS, *settings) as run:
        run.start()
        run.reach(2 * EVERY + 1, checkpoint=2 * EVERY)
        subprocess.run([sys.executable, "-m", "benchmarks.fault_poison", str(run.folder)], check=True)
        run.kill("supervisor", f"learner.tokens_per_micro_batch={ROW}")
        return finish(run, lambda verdict: _poisoned(run.folder, verdict), audited=True)


def segments(place: Path) -> Outcome:
    settings = (f"checkpoint.every={2 * EVERY}", "journal.keep=resume", f"journal.segment={SEGMENT}")
    with Quickstart(place, "segments", 2 * STEPS, *settings) as run:
        run.start()
        run.reach(2 * EVERY + BEHIND, checkpoint=2 * EVERY)
        _rot(run.folder, delivered(run.folder, 2 * EVERY)[:IN_ONE_STEP])
        _rot(run.folder, delivered(run.folder, 2 * EVERY + 1)[:1], head=True)
        damaged = run.kill("learner")
        run.kill("replay")
        return finish(run, lambda verdict: len(_lost(run.folder)), damaged=(damaged,))


def checkpoint(place: Path) -> Outcome:
    with Quickstart(place, "checkpoint", STEPS, f"checkpoint.every={EVERY}", "journal.keep=resume") as run:
        run.start()
        run.reach(2 * EVERY + BEHIND, checkpoint=2 * EVERY)
        shards = (run.folder / "checkpoints" / f"step_{2 * EVERY}").glob("*.distcp")
        shard = max(shards, key=lambda path: path.stat().st_size)
        _flip(shard, shard.stat().st_size // 2)
        killed = run.kill("learner")
        return finish(run, lambda verdict: _fell_back(run.folder, killed, EVERY), audited=True)


def _rot(folder: Path, group_ids: Sequence[int], *, head: bool = False) -> None:
    """Turn a bit in the middle of the frames of these groups, or in the heads of their records."""
    places = {
        entry.record.group_id: entry
        for entry in read_journal(folder / "journal")
        if isinstance(entry.record, Completed) and entry.record.group_id in group_ids
    }
    for entry in places.values():
        path = segment_path(folder / "journal", entry.place.segment)
        _flip(path, entry.place.offset if head else entry.end - entry.frame_bytes // 2)


def _flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0] ^ 1
        file.seek(position)
        file.write(bytes([byte]))


def _lost(folder: Path) -> set[int]:
    """The groups that were generated again because their frames were damaged."""
    damage = events(folder, "replay", "journal.damage")
    return {event["group_id"] for event in damage if "group_id" in event}


def _poisoned(folder: Path, verdict: Verdict) -> int:
    """Groups that were refused and groups that were quarantined; 0 unless both were."""
    refused = [event for event in events(folder, "replay", "group.refused") if "vocabulary" in event["reason"]]
    named = {event["group_id"] for event in events(folder, "replay", "group.quarantined")}
    both = len(refused) >= OUT_OF_VOCABULARY and len(named) == verdict.quarantined == LONG
    return len(refused) + len(named) if both else 0


def _fell_back(folder: Path, killed: float, step: int) -> int:
    """Starts of the learner since it was killed from the checkpoint of `step`."""
    starts = [event["version"] for event in events(folder, "learner", "ready") if event["time"] > killed]
    return sum(PolicyVersion.parse(version).step == step for version in starts)


SCENARIOS = (
    Scenario("no-journal", "regeneration behind the restored checkpoint, without a journal", no_journal),
    Scenario("frames", "regeneration behind the restored checkpoint, a flipped bit in a group's frames", frames),
    Scenario("poison", "poison groups: some at the door, some in the learner's hands", poison),
    Scenario("segments", "rot in old segments of the journal", segments),
    Scenario("checkpoint", "a damaged newest checkpoint", checkpoint),
)

"""The quickstart with real SGLang and Megatron-Core: each kind of process is killed once, and each fault is forced.

    worker ─▶ SGLang server ─▶ replay service ─▶ learner rank ─▶ supervisor, and `train` again ─▶ the end, audited

After each of these kills the run is left alone until it has trained on. Then come the faults of
`benchmarks/fault_scenarios.py`, each in a run of its own. Every run must end with 0 at its last step; its events and
its last checkpoint are judged as `benchmarks/faults.py` judges the record of scripted roles.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fault_scenarios import SCENARIOS, Outcome, finish
from benchmarks.quickstart_run import PATIENCE, Quickstart, Victim

IN_PEACE = 3  # learner steps between a recovery and the next kill
STEPS = 120


@dataclass(frozen=True)
class Kill:
    """A process to be killed, and what tells that the run has recovered."""

    name: str
    victim: Victim
    role: str  # whose event is the end of the recovery
    event: str = "ready"


KILLS = (
    Kill("worker", "generator", "generator-0"),
    Kill("SGLang server", "server", "generator-0", "server.restarted"),
    Kill("replay service", "replay", "replay-0"),
    Kill("learner rank", "learner", "learner-0"),
    Kill("supervisor", "supervisor", "learner-0"),
)


def run(folder: Path | None, only: list[str], target: Path | None) -> int:
    """Run every scenario, or `only` those; print a line for each. Returns 0 where nothing is broken."""
    outcomes: list[Outcome] = []
    with _folder(folder) as place:
        if not only or "kills" in only:
            outcomes.append(_kill_everything(place))
        for scenario in SCENARIOS:
            if not only or scenario.name in only:
                print(f"{scenario.name}: {scenario.what}", flush=True)
                outcomes.append(scenario.run(place))
                print(f"  {outcomes[-1]}", flush=True)
    print()
    for outcome in outcomes:
        print(f"{outcome.name:12} {outcome}")
    broken = [outcome.name for outcome in outcomes if not outcome.holds]
    print(f"broken: {', '.join(broken) or 'nothing'}")
    if target is not None:
        target.write_text(json.dumps([_figures(outcome) for outcome in outcomes], indent=1) + "\n")
    return 1 if broken else 0


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {"name": outcome.name, "holds": outcome.holds, "line": str(outcome)}


def _kill_everything(place: Path) -> Outcome:
    with Quickstart(place, "kills", STEPS, "checkpoint.every=10") as quickstart:
        quickstart.start()
        quickstart.train_on(0.0, IN_PEACE)
        for kill in KILLS:
            _kill_one(quickstart, kill)
        outcome = finish(quickstart, lambda verdict: len(KILLS), audited=True)
    print(f"  {outcome}", flush=True)
    return outcome


def _kill_one(quickstart: Quickstart, kill: Kill) -> None:
    before = quickstart.step()
    killed = quickstart.kill(kill.victim)
    deadline = time.monotonic() + PATIENCE
    while not quickstart.told_since(kill.role, kill.event, killed):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{kill.role} was not ready {PATIENCE:g} s after the kill of the {kill.name}")
        time.sleep(0.1)
    ready = time.time()
    trained = quickstart.train_on(ready, 1)
    print(
        f"{kill.name:15} killed at step {before}: {kill.role} ready again after {ready - killed:.1f} s, "
        f"the next step after {trained - killed:.1f} s",
        flush=True,
    )
    quickstart.train_on(ready, IN_PEACE)


@contextmanager
def _folder(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.absolute()
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)

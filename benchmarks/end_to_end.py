"""The whole circle where generation and training are balanced: asynchronous against synchronous and one step off.

    python -m benchmarks.end_to_end [--quick] [--repeats N] [--json FILE] [--keep FOLDER]

    sync            replay.order=synchronous: the bound 0
    sync, shared    the same with run.placement=shared: both sides have both cores, in turn
    one step off    replay.max_staleness=1, publish.interruption=drain, a whole step in flight: batch k + 1 is generated
                    by one version while batch k is trained, then both wait, and the next version is published
    bound 1, 2, 4   replay.max_staleness, all else by default: no side waits for the other within it

Everything is real: SGLang, worker, replay service with its journal, learner, publisher. All that generates has one
core, the learner has another (`balanced_run.py`); a shared placement leaves none of them idle, so that the faster of
the two synchronous runs is the one to compare with. Answers have log-normal lengths with sigma 0.8, drawn beforehand
and the same in every run (`drawn_lengths.py`), and a step takes four waves of requests.

The optimum of a repeat is the slower of its two sides, each alone on its own core (`one_side.py`): generation whose
batches are taken at once, and the learner on recorded batches. First of all the learner is given as much work a token
as makes it as slow as generation; what was tried and chosen is printed.

A figure is of the steps behind the warm-up of each run, up to where the last tickets are out. Tokens/s are those that
were trained, or generated meanwhile where these are fewer: a buffer that was filled before is no speed. Reward per
second is the slope of the mean reward over the wall clock; in these few steps a policy of random weights learns no more
than which token is right most often. All settings take turns within a repeat, and ratios are formed inside it; figures
are medians over the repeats, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.balanced_run import LOADS, SETTINGS, SHARED, SYNC, Bench, Load, Row, Setting
from streamrl.learner.batch_metrics import token_ages
from streamrl.replay.journal import recorded_batches

OF_THE_OPTIMUM, OF_SYNC = 0.85, 1.5  # bars, of JUDGED
JUDGED = "bound 2"
BALANCE = 0.15  # by which the two sides may differ, in seconds a token, where the bars are judged

# First steps that no figure counts: the learner's caches fill, and its slow first step gives generation a lead, up to
# the bound, that is no speed.
WARM_UP = 4

CANDIDATES = 3  # loads that are tried before the first repeat, those which should balance the sides best
STEPS, QUICK_STEPS = 10, 2  # that are counted
AHEAD = 2  # further steps of generation alone, so that tickets are out up to the end of the counted ones
COLUMNS = (
    "tokens/s", "of the optimum", "of sync", "of sync, shared", "reward/s x 1000", "staleness: mean, p95",
    "idle: learner, generators",
)  # fmt: skip
WIDTH = 170  # columns of the table where there is no terminal


@dataclass(frozen=True, slots=True)
class Run:
    """The counted steps of one run."""

    tokens_per_s: float
    staleness_mean: float  # learner steps, over tokens
    staleness_p95: float
    reward_per_s: float
    idle_learner: float  # share of the time
    idle_generator: float

    @classmethod
    def of(cls, rows: Sequence[Row], ages: np.ndarray) -> Run:
        """`rows`: of the counted steps and the one before; `ages` of their trained tokens, in learner steps."""
        began, rows = rows[0]["time"], rows[1:]
        tokens = min(sum(row[key] for row in rows) for key in ("tokens/trained", "tokens/generated"))
        times, rewards = ([row[key] for row in rows] for key in ("time", "reward/mean"))
        seconds = [row["time/step"] for row in rows]
        slope = np.polyfit(np.array(times) - began, rewards, 1)[0]
        return cls(
            tokens_per_s=tokens / (times[-1] - began),
            staleness_mean=float(np.mean(ages)),
            staleness_p95=float(np.percentile(ages, 95)),
            reward_per_s=float(slope),
            idle_learner=float(np.average([row["idle/learner"] for row in rows], weights=seconds)),
            idle_generator=float(np.average([row["idle/generator"] for row in rows], weights=seconds)),
        )


@dataclass(frozen=True, slots=True)
class Repeat:
    """One turn of everything."""

    generation: float  # tokens/s of that side alone
    training: float
    runs: dict[str, Run]  # by the setting's name

    @property
    def optimum(self) -> float:
        """Tokens/s of a circle whose sides never wait for each other."""
        return min(self.generation, self.training)

    @property
    def imbalance(self) -> float:
        """By which share the slower side is slower."""
        return max(self.generation, self.training) / self.optimum - 1

    def of_the_optimum(self, name: str) -> float:
        return self.runs[name].tokens_per_s / self.optimum

    def of(self, name: str, other: str) -> float:
        return self.runs[name].tokens_per_s / self.runs[other].tokens_per_s


def counted(rows: Sequence[Row], steps: int) -> Sequence[Row]:
    """The counted steps and the one before, whose end is where they begin."""
    return rows[WARM_UP - 1 : WARM_UP + steps]


def generated_per_s(rows: Sequence[Row]) -> float:
    """Of generation alone."""
    return float(sum(row["tokens/generated"] for row in rows[1:]) / (rows[-1]["time"] - rows[0]["time"]))


def trained_per_s(rows: Sequence[Row]) -> float:
    """Of the learner at work: it did not wait, apart from reading the record."""
    return float(sum(row["tokens/trained"] for row in rows[1:]) / sum(_at_work(row) for row in rows[1:]))


def _at_work(row: Row) -> float:
    """Seconds of a step without the wait for its batch."""
    return float(row["time/step"] - row["time/wait"])


def expected(load: Load, rows: Sequence[Row]) -> float:
    """The learner's tokens/s with a load, from its phases on recorded batches without one."""
    tokens = sum(row["tokens/trained"] for row in rows[1:])
    forward, backward = (sum(row[key] for row in rows[1:]) / tokens for key in ("time/forward", "time/backward"))
    return 1 / (1 / trained_per_s(rows) + (load.passes - 1) * (forward + backward) + load.forwards * forward)


def nearest(speeds: Mapping[Load, float], generation: float) -> list[Load]:
    """The loads, by how near the learner's tokens/s with them come to those of generation."""
    return sorted(speeds, key=lambda load: abs(math.log(speeds[load] / generation)))


class Measurement:
    """All runs of one start of the benchmark."""

    def __init__(self, bench: Bench, settings: Sequence[Setting], steps: int) -> None:
        self._bench = bench
        self._settings = settings
        self._steps = steps

    def balance(self) -> Load:
        """Give the learner the load that balances the two sides: of those that should, the one that is seen to."""
        steps = WARM_UP + self._steps
        self._bench.run(SYNC, "balance", steps)
        rows = self._training("balance", "balance-training")
        sides = [self._generation("balance-generation")]
        near = nearest({load: expected(load, rows) for load in LOADS}, sides[0])[:CANDIDATES]
        seen = {load: trained_per_s(self._training("balance", f"balance-{load.slug}", load.changes)) for load in near}
        sides.append(self._generation("balance-generation-again"))
        generation = statistics.mean(sides)
        load = nearest(seen, generation)[0]
        self._bench.load = load.keys
        told = ", ".join(f"{each.name}: {speed:.0f}" for each, speed in seen.items())
        print(
            f"alone: generation {generation:.0f} tokens/s, learner {trained_per_s(rows):.0f}; with {told}; "
            f"chosen: {load.name}",
            flush=True,
        )
        return load

    def repeat(self, number: int) -> Repeat:
        """Every setting once, each first in its turn, then both sides alone."""
        first = number % len(self._settings)
        runs = {each.name: self._run(each, number) for each in (*self._settings[first:], *self._settings[:first])}
        trained = self._training(f"{SYNC.name}-{number}", f"training-{number}")
        repeat = Repeat(self._generation(f"generation-{number}"), trained_per_s(trained), runs)
        told = ", ".join(f"{name} {repeat.of_the_optimum(name):.2f}" for name in runs)
        print(
            f"repeat {number + 1}: generation alone {repeat.generation:.0f} tokens/s, learner alone "
            f"{repeat.training:.0f}; of the optimum: {told}",
            flush=True,
        )
        return repeat

    def _generation(self, name: str) -> float:
        """Tokens/s of generation alone."""
        rows = self._bench.generation_alone(name, WARM_UP + self._steps + AHEAD)
        return generated_per_s(counted(rows, self._steps))

    def _training(self, recorded: str, name: str, changes: Sequence[str] = ()) -> Sequence[Row]:
        """The counted steps of the learner alone."""
        rows = self._bench.training_alone(recorded, name, WARM_UP + self._steps, changes)
        return counted(rows, self._steps)

    def _run(self, setting: Setting, number: int) -> Run:
        name = f"{setting.slug}-{number}"
        rows = self._bench.run(setting, name, WARM_UP + self._steps + setting.bound)
        ages = _ages(self._bench.folder(name), range(WARM_UP, WARM_UP + self._steps))
        return Run.of(counted(rows, self._steps), ages)


def _ages(run_folder: Path, steps: range) -> np.ndarray:
    """Staleness of every trained token of these steps, from the journal."""
    return np.concatenate(
        [
            token_ages(sample, batch.step)[sample.loss_mask]
            for batch in recorded_batches(run_folder / "journal")
            if batch.step in steps
            for sample in batch.samples
        ]
    )


def ratios(repeats: Sequence[Repeat]) -> dict[str, list[float]]:
    """What the bars and `make bench` look at, one value a repeat: higher is better."""
    names = list(repeats[0].runs)
    found = {f"{name} of the optimum": [repeat.of_the_optimum(name) for repeat in repeats] for name in names}
    for other in [each.name for each in (SYNC, SHARED) if each.name in names]:
        found |= {f"{name} of {other}": [each.of(name, other) for each in repeats] for name in names if name != other}
    return found


def missed(repeats: Sequence[Repeat]) -> list[str]:
    """The bars that were not reached, by the medians."""
    found = ratios(repeats)
    bars = {f"{JUDGED} of the optimum": OF_THE_OPTIMUM, f"{JUDGED} of sync": OF_SYNC}
    broken = [
        f"{name}: {statistics.median(found[name]):.2f}, at least {bar:g} is wanted"
        for name, bar in bars.items()
        if statistics.median(found[name]) < bar
    ]
    imbalance = statistics.median(repeat.imbalance for repeat in repeats)
    if imbalance > BALANCE:
        broken.append(f"one side is {imbalance:.0%} slower than the other, at most {BALANCE:.0%} is balanced")
    return broken


def show(console: Console, repeats: Sequence[Repeat]) -> None:
    found = ratios(repeats)
    drawn = Table(title=f"{len(repeats)} repeats: median (smallest .. largest)")
    drawn.add_column("")
    for column in COLUMNS:
        drawn.add_column(column, justify="right")
    for name in repeats[0].runs:
        runs = [repeat.runs[name] for repeat in repeats]
        middle = {key: statistics.median(getattr(run, key) for run in runs) for key in Run.__slots__}
        drawn.add_row(
            name,
            spread([run.tokens_per_s for run in runs], ".0f"),
            spread(found[f"{name} of the optimum"]),
            spread(found.get(f"{name} of sync", [])),
            spread(found.get(f"{name} of {SHARED.name}", [])),
            spread([1000 * run.reward_per_s for run in runs], ".1f"),
            f"{middle['staleness_mean']:.2f}, {middle['staleness_p95']:.0f}",
            f"{middle['idle_learner']:.0%}, {middle['idle_generator']:.0%}",
        )
    console.print(drawn)
    sides = {side: spread([getattr(each, side) for each in repeats], ".0f") for side in ("generation", "training")}
    print(f"alone: generation {sides['generation']} tokens/s, training {sides['training']}")


def spread(values: Sequence[float], form: str = ".2f") -> str:
    if not values:
        return ""
    return f"{statistics.median(values):{form}} ({min(values):{form}} .. {max(values):{form}})"


def figures(repeats: Sequence[Repeat], load: Load, steps: int) -> dict[str, object]:
    return {
        "benchmark": "end_to_end",
        "steps": steps,
        "load": load.name,
        "cpus": os.cpu_count(),
        "repeats": [{**asdict(repeat), "optimum": repeat.optimum} for repeat in repeats],
        "ratios": [
            {"name": name, "median": statistics.median(values), "low": min(values), "high": max(values)}
            for name, values in ratios(repeats).items()
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="two repeats of sync and bound 2, whose bars are not judged"
    )
    parser.add_argument("--repeats", type=int, help="interleaved repeats (default: 5, quick: 2)")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--keep", type=Path, help="new folder for the runs, to look into them later")
    options = parser.parse_args()
    settings = tuple(each for each in SETTINGS if each.name in (SYNC.name, JUDGED)) if options.quick else SETTINGS
    steps = QUICK_STEPS if options.quick else STEPS
    with tempfile.TemporaryDirectory() as scratch, Bench.serving(options.keep or Path(scratch)) as bench:
        measurement = Measurement(bench, settings, steps)
        load = measurement.balance()
        repeats = [measurement.repeat(number) for number in range(options.repeats or (2 if options.quick else 5))]
    console = Console()
    show(console if console.is_terminal else Console(width=WIDTH), repeats)
    broken = missed(repeats)
    judged = "not judged in the quick form" if options.quick else ("; ".join(broken) or "all reached")
    print(f"bars, {JUDGED}: {OF_THE_OPTIMUM:g} of the optimum, {OF_SYNC:g} times sync: {judged}")
    if options.json:
        options.json.write_text(json.dumps(figures(repeats, load, steps), indent=1) + "\n")
    return 1 if broken and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())

"""The whole circle where generation and training are balanced: asynchronous against synchronous and one step off.

    python -m benchmarks.end_to_end [--quick] [--repeats N] [--json FILE] [--keep FOLDER]

    sync            replay.order=synchronous: the bound 0
    sync, shared    the same with run.placement=shared: both sides have both cores, in turn
    one step off    replay.max_staleness=1, publish.interruption=drain, a whole step in flight: batch k + 1 is generated
                    by one version while batch k is trained, then both wait, and the next version is published
    bound 1, 2, 4   replay.max_staleness, all else by default: no side waits for the other within it
    4, at once      the last one with replay.release=eager: what do tickets just in time cost, and how old is the data?

Everything is real: SGLang, worker, replay service with its journal, learner, publisher. All that generates has one
core, the learner has another (`balanced_run.py`); a shared placement leaves none of them idle, so that the faster of
the two synchronous runs is the one to compare with. Answers have log-normal lengths with sigma 0.8, drawn beforehand
and the same in every run (`drawn_lengths.py`), and a step takes four waves of requests.

The optimum of a repeat is the slower of its two sides, each alone on its own core (`one_side.py`): generation whose
batches are taken at once, and the learner on recorded batches. Either is measured several times in a repeat, between
the settings. First of all the learner is given as much work a token as makes it as slow as generation; what was tried
and chosen is printed. Ratios are taken in two ways, within a repeat and of medians; the most that the layout allows
against the synchronous run is printed beside them (`optimum.py`).

A figure is of the steps behind the warm-up of each run, up to where the last tickets are out. Tokens/s are those that
were trained, or generated meanwhile where these are fewer: a buffer that was filled before is no speed. Reward per
second is the slope of the mean reward over the wall clock; in these few steps a policy of random weights learns no more
than which token is right most often. All settings take turns within a repeat; figures are medians over the repeats,
with the smallest and the largest.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.balanced_run import LOADS, SETTINGS, SHARED, SYNC, Bench, Load, Row, Setting
from benchmarks.optimum import (
    JUDGED,
    OF_SYNC,
    OF_THE_OPTIMUM,
    Repeat,
    Run,
    all_sides,
    lines,
    missed,
    of_medians,
    parts,
    ratios,
    spread,
)
from streamrl.lab.output import output_file, output_folder
from streamrl.learner.batch_metrics import token_ages
from streamrl.replay.journal import recorded_batches


@dataclass(frozen=True, slots=True)
class Form:
    """How much is run."""

    # First steps that no figure counts: the learner's caches fill, and its slow first step gives generation a lead, up
    # to the bound, that is no speed.
    warm_up: int
    steps: int  # that are counted
    measurements: int  # of either side alone in a repeat
    candidates: int  # loads that are tried before the first repeat, those which should balance the sides best
    repeats: int

    @property
    def end(self) -> int:
        """The first step behind the counted ones."""
        return self.warm_up + self.steps

    def counted(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The counted steps and the one before, whose end is where they begin."""
        return rows[self.warm_up - 1 : self.end]


FULL = Form(warm_up=4, steps=10, measurements=3, candidates=3, repeats=5)
QUICK = Form(warm_up=1, steps=2, measurements=1, candidates=1, repeats=1)
AHEAD = 2  # further steps of generation alone, so that tickets are out up to the end of the counted ones
COLUMNS = (
    "tokens/s", "of the optimum", "of sync", "of sync, shared", "the three, of medians", "reward/s x 1000",
    "staleness: mean, p95", "idle: learner, generators",
)  # fmt: skip
WIDTH = 190  # columns of the table where there is no terminal


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


def turns(settings: Sequence[Setting], measurements: int) -> list[Setting | None]:
    """The order of a repeat: all settings, and None where both sides are measured, evenly between them.

    >>> turns("abcd", 3)
    [None, 'a', 'b', None, 'c', 'd', None]
    >>> turns("abcd", 1)
    ['a', 'b', None, 'c', 'd']
    """
    count, apart = len(settings), max(measurements - 1, 1)
    places = [round(count * place / apart) for place in range(measurements)] if measurements > 1 else [count // 2]
    order: list[Setting | None] = []
    for index in range(count + 1):
        order += [None] * places.count(index)
        order += settings[index : index + 1]
    return order


class Measurement:
    """All runs of one start of the benchmark."""

    def __init__(self, bench: Bench, settings: Sequence[Setting], form: Form) -> None:
        self._bench = bench
        self._settings = settings
        self._form = form
        self._load: Load | None = None

    def balance(self) -> Load:
        """Give the learner the load that balances the two sides: of those that should, the one that is seen to."""
        self._bench.run(SYNC, "balance", self._form.end)
        rows = self._training("balance", "balance-training")
        sides = [self._generation("balance-generation")]
        near = nearest({load: expected(load, rows) for load in LOADS}, sides[0])[: self._form.candidates]
        seen = {load: trained_per_s(self._training("balance", f"balance-{load.slug}", load.changes)) for load in near}
        sides.append(self._generation("balance-generation-again"))
        generation = statistics.mean(sides)
        load = nearest(seen, generation)[0]
        self._load, self._bench.load = load, load.keys
        told = ", ".join(f"{each.name}: {speed:.0f}" for each, speed in seen.items())
        print(
            f"alone: generation {generation:.0f} tokens/s, learner {trained_per_s(rows):.0f}; with {told}; "
            f"chosen: {load.name}",
            flush=True,
        )
        return load

    def repeat(self, number: int) -> Repeat:
        """Every setting once, each first in its turn, and both sides alone between them."""
        load = self._load
        assert load is not None
        runs: dict[str, Run] = {}
        generation: list[float] = []
        training: list[float] = []

        def generate() -> None:
            generation.append(self._generation(f"generation-{number}-{len(generation)}"))

        def train() -> None:
            rows = self._training("balance", f"training-{number}-{len(training)}", load.changes)
            training.append(trained_per_s(rows))

        first = number % len(self._settings)
        for setting in turns((*self._settings[first:], *self._settings[:first]), self._form.measurements):
            if setting is not None:
                runs[setting.name] = self._run(setting, number)
                continue
            for side in (generate, train) if (number + len(training)) % 2 == 0 else (train, generate):
                side()
        repeat = Repeat(tuple(generation), tuple(training), {each.name: runs[each.name] for each in self._settings})
        told = ", ".join(f"{name} {repeat.of_the_optimum(name):.2f}" for name in runs)
        print(
            f"repeat {number + 1}: generation alone {spread(generation, '.0f')} tokens/s, learner alone "
            f"{spread(training, '.0f')}; of the optimum: {told}",
            flush=True,
        )
        return repeat

    def _generation(self, name: str) -> float:
        """Tokens/s of generation alone."""
        rows = self._bench.generation_alone(name, self._form.end + AHEAD)
        return generated_per_s(self._form.counted(rows))

    def _training(self, recorded: str, name: str, changes: Sequence[str] = ()) -> Sequence[Row]:
        """The counted steps of the learner alone."""
        rows = self._bench.training_alone(recorded, name, self._form.end, changes)
        return self._form.counted(rows)

    def _run(self, setting: Setting, number: int) -> Run:
        name = f"{setting.slug}-{number}"
        rows = self._bench.run(setting, name, self._form.end + setting.bound)
        ages = _ages(self._bench.folder(name), range(self._form.warm_up, self._form.end))
        return Run.of(self._form.counted(rows), ages)


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


def show(console: Console, repeats: Sequence[Repeat]) -> None:
    paired, medians = ratios(repeats), of_medians(repeats)
    drawn = Table(title=f"{len(repeats)} repeats: median (smallest .. largest)")
    drawn.add_column("")
    for column in COLUMNS:
        drawn.add_column(column, justify="right")
    for name in repeats[0].runs:
        runs = [repeat.runs[name] for repeat in repeats]
        middle = {key: statistics.median(getattr(run, key) for run in runs) for key in Run.__slots__}
        compared = [f"{name} of {other}" for other in ("the optimum", SYNC.name, SHARED.name)]
        drawn.add_row(
            name,
            spread([run.tokens_per_s for run in runs], ".0f"),
            *(spread(paired.get(ratio, [])) for ratio in compared),
            ", ".join(f"{medians[ratio]:.2f}" if ratio in medians else "-" for ratio in compared),
            spread([1000 * run.reward_per_s for run in runs], ".1f"),
            f"{middle['staleness_mean']:.2f}, {middle['staleness_p95']:.0f}",
            f"{middle['idle_learner']:.0%}, {middle['idle_generator']:.0%}",
        )
    console.print(drawn)
    for line in lines(repeats, JUDGED):
        print(line)


def figures(repeats: Sequence[Repeat], load: Load, steps: int) -> dict[str, object]:
    sides = all_sides(repeats)
    return {
        "benchmark": "end_to_end",
        "steps": steps,
        "load": load.name,
        "cpus": os.cpu_count(),
        "repeats": [{**asdict(repeat), "optimum": repeat.sides.optimum} for repeat in repeats],
        "sides": {**asdict(sides), "optimum": sides.optimum, "in_turn": sides.in_turn, "ceiling": sides.ceiling},
        "parts": parts(repeats, JUDGED),
        "of_medians": of_medians(repeats),
        "ratios": [
            {"name": name, "median": statistics.median(values), "low": min(values), "high": max(values)}
            for name, values in ratios(repeats).items()
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="sync and bound 2, shortly; their bars are not judged")
    for name, text in (("repeats", "interleaved repeats"), ("measurements", "of either side alone in a repeat")):
        default = f"(default: {getattr(FULL, name)}, quick: {getattr(QUICK, name)})"
        parser.add_argument(f"--{name}", type=int, choices=range(1, 10), help=f"{text} {default}")
    parser.add_argument("--json", type=output_file, help="write the figures here too")
    parser.add_argument("--keep", type=output_folder, help="new folder for the runs, to look into them later")
    options = parser.parse_args()
    settings = tuple(each for each in SETTINGS if each.name in (SYNC.name, JUDGED)) if options.quick else SETTINGS
    form = QUICK if options.quick else FULL
    given = {"repeats": options.repeats, "measurements": options.measurements}
    form = replace(form, **{name: count for name, count in given.items() if count is not None})
    with tempfile.TemporaryDirectory() as scratch, Bench.serving(options.keep or Path(scratch)) as bench:
        measurement = Measurement(bench, settings, form)
        load = measurement.balance()
        repeats = [measurement.repeat(number) for number in range(form.repeats)]
    console = Console()
    show(console if console.is_terminal else Console(width=WIDTH), repeats)
    broken = missed(repeats)
    judged = "not judged in the quick form" if options.quick else ("; ".join(broken) or "all reached")
    print(f"bars, {JUDGED}: {OF_THE_OPTIMUM:g} of the optimum, {OF_SYNC:g} times sync: {judged}")
    if options.json:
        options.json.write_text(json.dumps(figures(repeats, load, form.steps), indent=1) + "\n")
    return 1 if broken and not options.quick else 0


if __name__ == "__main__":
    sys.exit(main())

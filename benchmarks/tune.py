"""`streamrl tune`'s choice against a measured grid: is anything in the grid faster?

    python -m benchmarks.tune [--quick] [--only NAME] [--rounds N] [--folder FOLDER] [--json PATH]

    long-answers     configs/long_answers.yaml, with which the simulator was made
    drawn-lengths    log-normal lengths, another model and group size, 16 places on the server: it never saw them

Each configuration is calibrated and tuned (bounds up to 4), then 14 settings run once, then the choice and the best
three of them in turns. Tokens/s are the smaller of those trained and generated, behind the warm-up. Server and learner
have cores of their own.

No setting of the grid has another micro batch, and the choice may. So the choice and the best setting with its micro
batch take turns once more: the definition that looks worse, which has no bar.

Exit code 1 where the choice's median is below BAR of the best one's, or the median of the rounds' ratios is: the
machine's drift meets both sides of a round alike, and may favour either in the medians. Where the interval is wide,
`--rounds` adds to those that are kept; the verdict is that of all of them. The quick form runs few and short ones, and
judges nothing. What is measured is kept in FOLDER: the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.balanced_run import ALPHABET, write_model
from benchmarks.drawn_lengths import LONGEST
from benchmarks.tune_grid import Comparison, Kept, Overrides, grid, with_its_micro_batch
from launch import tiny_model
from streamrl.config import file as config_file
from streamrl.engine.server import serving
from streamrl.lab.output import output_file
from streamrl.lab.simulate.figures import figures
from streamrl.lab.simulate.on_cores import pin, run_command
from streamrl.lab.simulate.validation import SAME
from streamrl.lab.tune.runs import cores_of
from streamrl.lab.tune.search import Rule
from streamrl.lab.tune.tuned import Limits, Runs, Source, Tuned, tuned
from streamrl.observe.bars import Bar
from streamrl.observe.metrics import read_metrics

BAR = 0.95
OLDEST = 4.0  # bound, of the grid and of the choice
BEST = 3  # of the grid, that run again beside the choice
ONCE_MORE = 1000  # added to the rounds of the second turns
TIMEOUT = 900.0  # seconds of one run


@dataclass(frozen=True, slots=True)
class Form:
    """How much is run."""

    steps: int
    settings: int | None  # of the grid; None: all
    rounds: int  # of the turns that are judged
    once_more: int  # rounds of the second turns
    points: int  # that the search simulates


FULL, QUICK = Form(30, None, 5, 5, 200), Form(6, 2, 1, 1, 8)

DRAWN: dict[str, Any] = {
    "task": {"name": "benchmarks.drawn_lengths:DrawnLengths", "args": {"length": 3, "alphabet": ALPHABET}},
    "generate": {
        "group_size": 4, "groups_in_flight": 16, "sampling": {"max_new_tokens": LONGEST},
        "server_args": {"max_running_requests": 16},
    },
    "replay": {"groups_per_step": 16},
    "learner": {"passes": 2, "tokens_per_micro_batch": 1024},
}  # fmt: skip


def configuration(name: str, folder: Path) -> Path:
    """The file of a configuration, with its model beside it."""
    model = folder / "model"
    if name == "long-answers":
        if not model.exists():
            tiny_model.make(model, symbols=26)
        tree: dict[str, Any] = {"base": str(Path("configs/long_answers.yaml").absolute())}
    else:
        if not model.exists():
            write_model(model)
        tree = dict(DRAWN)
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump({**tree, "model": {"path": str(model), "dtype": "float32"}}))
    return path


NAMES = ("long-answers", "drawn-lengths")


class Bench:
    """One configuration on one server."""

    def __init__(self, name: str, folder: Path, form: Form, path: Path, address: str) -> None:
        self.name, self._folder, self._form, self._path = name, folder, form, path
        self._given = (f"generate.attach=[{address}]",)
        self.config = config_file.load(path, self._given)
        self._kept = Kept(folder / "measured.jsonl")

    def tuned(self) -> Tuned:
        runs = Runs(folder=self._folder / "calibration", steps=self._form.steps, budget=4 * TIMEOUT)
        return tuned(Source(self._path, self._given), Rule(), Limits(oldest=OLDEST, points=self._form.points), runs)

    def measure(self, overrides: Overrides, round_: int, bar: Bar) -> tuple[float, float]:
        """(tokens/s, mean age) of one run, unless it was measured before."""
        steps = self._form.steps
        found = self._kept.get(self.name, overrides, round_, steps)
        if found is not None:
            bar.found()
        else:
            own = [f"run.folder={self._folder}", "run.name=measured", f"run.steps={steps}"]
            words = [*self._given, *SAME, *own, *overrides]
            command = [sys.executable, "-m", "streamrl.cli", "train", str(self._path), "--fresh", *words]
            run_command(command, self._folder / "runs.log", TIMEOUT, cores_of(self.config))
            rows = list(read_metrics(self._folder / "measured"))
            fresh = math.ceil(config_file.load(self._path, words).replay.bound)
            figure = figures(rows[fresh:] if len(rows) > fresh + 4 else rows)
            found = (figure.sustained, figure.staleness_mean)
            self._kept.add(self.name, overrides, round_, steps, found)
            bar.advance()
        return found

    def in_turns(self, settings: Sequence[Overrides], rounds: range, bar: Bar) -> dict[Overrides, list[float]]:
        """Tokens/s of each by round."""
        rates: dict[Overrides, list[float]] = {each: [] for each in settings}
        order = list(rates)  # each once
        for round_ in rounds:
            begin = round_ % len(order)
            for each in (*order[begin:], *order[:begin]):
                rates[each].append(self.measure(each, round_, bar)[0])
        return rates

    def run(self) -> tuple[list[Comparison], dict[str, Any]]:
        """The choice against the best of the grid, then against that with the choice's micro batch."""
        settings = grid(self.config)[:: 1 if self._form.settings is None else -5][: self._form.settings]
        first = range(1, 1 + self._form.rounds)
        second = range(ONCE_MORE + 1, ONCE_MORE + 1 + self._form.once_more)
        turns = len(first) * (BEST + 1) + len(second) * 2
        print(
            f"{self.name}: calibration, {len(settings)} settings once, then up to {turns} runs in turns, of "
            f"{self._form.steps} steps each; a run that takes {TIMEOUT:.0f} s fails (kept in {self._folder})",
            flush=True,
        )
        chosen = self.tuned()
        choice = chosen.overrides(chosen.choice)
        with Bar(self.name, "runs", len(settings) + turns) as bar:
            once = {}
            for each in settings:
                once[each] = self.measure(each, 0, bar)
            best = sorted(once, key=lambda each: -once[each][0])[:BEST]
            compared = [Comparison.of("", choice, self.in_turns((choice, *best), first, bar))]
            best_of_grid = compared[0].verdict.best
            if (harder := with_its_micro_batch(best_of_grid, choice)) != best_of_grid:
                rates = self.in_turns((choice, harder), second, bar)
                compared.append(Comparison.of(" with its micro batch", choice, rates))
        predicted = {"rate": chosen.choice.figures.sustained, "age": chosen.choice.figures.staleness_mean}
        row = {
            "name": self.name,
            "choice": list(choice),
            "predicted": predicted,
            "grid": [{"overrides": list(each), "rate": rate, "age": age} for each, (rate, age) in once.items()],
            "turns": [
                [
                    {"overrides": list(each), "rates": values, "age": self.age(each)}
                    for each, values in comparison.rates.items()
                ]
                for comparison in compared
            ],
        }
        _print(row, compared)
        return compared, row

    def age(self, overrides: Overrides) -> float:
        """The mean age of what is trained, over all rounds in turns."""
        return statistics.mean(self._kept.ages(self.name, overrides, self._form.steps))


def _print(row: dict[str, Any], compared: Sequence[Comparison]) -> None:
    for each in row["grid"]:
        print(f"  {each['rate']:8,.0f} tokens/s, mean age {each['age']:.2f}: {' '.join(each['overrides'])}")
    predicted = row["predicted"]
    print(f"  in turns; of the choice {predicted['rate']:,.0f} tokens/s and {predicted['age']:.2f} are predicted:")
    for turns, comparison in zip(row["turns"], compared, strict=True):
        for each in turns:
            mark = "(the choice) " if each["overrides"] == row["choice"] else ""
            rate = statistics.median(each["rates"])
            print(f"  {rate:8,.0f} tokens/s, mean age {each['age']:.2f}: {mark}{' '.join(each['overrides'])}")
        found = comparison.verdict
        print(f"{row['name']}: {found.of_medians} of the best{comparison.told}, {' '.join(found.best)}")
        print(f"  {found.in_rounds} as the median of the rounds' ratios", flush=True)


@contextmanager
def bench(name: str, folder: Path, form: Form) -> Iterator[Bench]:
    """With a server for all runs, on its half of the cores."""
    folder.mkdir(parents=True, exist_ok=True)
    path = configuration(name, folder)
    config = config_file.load(path)
    with serving(config, folder) as server:
        if (cores := cores_of(config)) is not None:
            pin(server.pid, cores[0])
        yield Bench(name, folder, form, path, server.address)


def main() -> int:
    options = _parse()
    form = QUICK if options.quick else FULL
    form = form if options.rounds is None else replace(form, rounds=options.rounds)
    compared: dict[str, list[Comparison]] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="streamrl-tune-") as own:
        root = (options.folder or (Path(own) if options.quick else Path("runs/bench-tune"))).absolute()
        for name in (options.only,) if options.only else NAMES[: 1 if options.quick else None]:
            with bench(name, root / name, form) as found:
                compared[name], row = found.run()
                rows.append(row)
    missed = [name for name, (of_grid, *_) in compared.items() if of_grid.verdict.least < BAR]
    ratios = [
        {"name": f"choice of the best{each.told}, {name}{how}", "median": of.value, "low": of.low, "high": of.high}
        for name, comparisons in compared.items()
        for each in comparisons
        for how, of in (("", each.verdict.of_medians), (", in rounds", each.verdict.in_rounds))
    ]
    if options.json is not None:
        options.json.write_text(json.dumps({"quick": options.quick, "ratios": ratios, "rows": rows}, indent=1) + "\n")
    if options.quick:
        print(f"the bar of {BAR} is not judged in the quick form")
        return 0
    print(f"bar {BAR}: {'MISSED by ' + ', '.join(missed) if missed else 'held'}")
    return 1 if missed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one configuration, two settings, short runs; no bar")
    parser.add_argument("--only", choices=NAMES, help="one of the configurations")
    parser.add_argument("--rounds", type=int, help="of the turns that are judged (default: 5, quick 1)")
    parser.add_argument("--folder", type=Path, help="where runs and results are kept (default: runs/bench-tune)")
    parser.add_argument("--json", type=output_file, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

"""`streamrl tune`'s choice against a measured grid: is anything in the grid faster?

    python -m benchmarks.tune [--quick] [--only NAME ...] [--rounds N] [--folder FOLDER] [--json PATH]

    long-answers     configs/long_answers.yaml, with which the simulator was made
    drawn-lengths    log-normal lengths, another model and group size, 16 places on the server: the simulator was made
                     without it, and mended after an earlier measurement of it
    short-answers    the quickstart in steps of 4 groups of 16 answers: nobody tuned it before

Each configuration is calibrated and tuned (bounds up to 4). Then 14 settings run once, and once more with the choice's
micro batch where it has another; the best six run twice more; the choice and the best three of these take turns. As
many steps of every run count, none of them at its ends, in which a larger bound would look slower than it is. Tokens/s
are the smaller of those trained and generated. Server and learner have cores of their own.

Exit code 1 where the choice's median is below BAR of the best one's, or the median of the rounds' ratios is: the
machine's drift meets both sides of a round alike, and may favour either in the medians. Where the interval is wide,
`--rounds` adds to those that are kept; the verdict is that of all of them. The quick form runs few and short ones, and
judges nothing. What is measured is kept in FOLDER: the same command goes on. `--json` keeps the configurations that the
file has and this start has not: each may be measured by itself, on a machine that its row names.
"""

from __future__ import annotations

import argparse
import json
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
from benchmarks.suite import this_machine
from benchmarks.tune_grid import Kept, Overrides, Verdict, best, grid, judged, verdict
from launch import tiny_model
from streamrl.config import file as config_file
from streamrl.engine.server import serving
from streamrl.lab.output import output_file, output_folder
from streamrl.lab.simulate.figures import WARM_UP, at_ends, between, figures
from streamrl.lab.simulate.on_cores import pin, run_command
from streamrl.lab.simulate.validation import SAME
from streamrl.lab.tune.runs import cores_of
from streamrl.lab.tune.search import Rule
from streamrl.lab.tune.tuned import Limits, Runs, Source, Tuned, tuned
from streamrl.observe.bars import Bar
from streamrl.observe.metrics import read_metrics

BAR = 0.95
OLDEST = 4.0  # bound, of the grid and of the choice
LIKELY = 6  # of the grid, that run AGAIN times more, as one run may be lucky
AGAIN = 2
BEST = 3  # of these, that take turns with the choice
TIMEOUT = 900.0  # seconds of one run


@dataclass(frozen=True, slots=True)
class Form:
    """How much is run."""

    steps: int  # of a run that count
    settings: int | None  # of the grid; None: all
    rounds: int  # of the turns
    points: int  # that the search simulates


FULL, QUICK = Form(24, None, 9, 200), Form(4, 2, 1, 8)

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
    elif name == "short-answers":
        if not model.exists():
            tiny_model.make(model)
        tree = {"base": str(Path("configs/quickstart.yaml").absolute()), **SHORT}
    else:
        if not model.exists():
            write_model(model)
        tree = dict(DRAWN)
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump({**tree, "model": {"path": str(model), "dtype": "float32"}}))
    return path


SHORT: dict[str, Any] = {"generate": {"group_size": 16}, "replay": {"groups_per_step": 4}}

NAMES = ("long-answers", "drawn-lengths", "short-answers")


class Bench:
    """One configuration on one server."""

    def __init__(self, name: str, folder: Path, form: Form, path: Path, address: str) -> None:
        self.name, self._folder, self._form, self._path = name, folder, form, path
        self._given = (f"generate.attach=[{address}]",)
        self.config = config_file.load(path, self._given)
        self._kept = Kept(folder / "measured.jsonl")

    def tuned(self) -> Tuned:
        runs = Runs(folder=self._folder / "calibration", steps=self._form.steps + 2 * WARM_UP, budget=4 * TIMEOUT)
        return tuned(Source(self._path, self._given), Rule(), Limits(oldest=OLDEST, points=self._form.points), runs)

    def measure(self, overrides: Overrides, round_: int, bar: Bar) -> tuple[float, float]:
        """(tokens/s, mean age) of one run, unless it was measured before."""
        ends = at_ends(config_file.load(self._path, [*self._given, *overrides]))
        steps = self._form.steps + WARM_UP + ends
        found = self._kept.get(self.name, overrides, round_, steps)
        if found is not None:
            bar.found()
        else:
            length = f"run.steps={steps}"
            words = [*self._given, *SAME, f"run.folder={self._folder}", "run.name=measured", length, *overrides]
            command = [sys.executable, "-m", "streamrl.cli", "train", str(self._path), "--fresh", *words]
            run_command(command, self._folder / "runs.log", TIMEOUT, cores_of(self.config))
            rows = list(read_metrics(self._folder / "measured"))
            figure = figures(between(rows, config_file.load(self._path, words)))
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

    def run(self) -> tuple[Verdict, dict[str, Any]]:
        """The choice against the best of the grid."""
        chosen = self.tuned()
        choice = chosen.overrides(chosen.choice)
        settings = grid(self.config, choice)[:: 1 if self._form.settings is None else -5][: self._form.settings]
        likely, best_ones = (min(count, len(settings)) for count in (LIKELY, BEST))
        turns = self._form.rounds * (best_ones + 1)
        print(
            f"{self.name}: {len(settings)} settings once, the best {likely} {AGAIN} times more, then {turns} runs in "
            f"turns, of which {self._form.steps} steps count; a run that takes {TIMEOUT:.0f} s fails (kept in "
            f"{self._folder})",
            flush=True,
        )
        with Bar(self.name, "runs", len(settings) + likely * AGAIN + turns) as bar:
            screened = self.in_turns(settings, range(-AGAIN, 1 - AGAIN), bar)
            for each, more in self.in_turns(best(screened, likely), range(1 - AGAIN, 1), bar).items():
                screened[each] += more
            of_likely = {each: rates for each, rates in screened.items() if len(rates) > 1}
            rates = self.in_turns((choice, *best(of_likely, best_ones)), range(1, 1 + self._form.rounds), bar)
        found = verdict(rates[choice], {each: values for each, values in rates.items() if each != choice})
        predicted = {"rate": chosen.choice.figures.sustained, "age": chosen.choice.figures.staleness_mean}
        row = {
            "name": self.name,
            "machine": f"{this_machine().processor}, {this_machine().cores} cores",
            "choice": list(choice),
            "predicted": predicted,
            "grid": [self._row(each, values) for each, values in screened.items()],
            "turns": [self._row(each, values) for each, values in rates.items()],
        }
        _print(row, found)
        return found, row

    def _row(self, overrides: Overrides, rates: Sequence[float]) -> dict[str, Any]:
        """With the mean age of what is trained, over all its runs."""
        age = statistics.mean(self._kept.ages(self.name, overrides, self._form.steps))
        return {"overrides": list(overrides), "rates": list(rates), "age": age}


def joined(path: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """These configurations, and the others that a file of full figures has, in the order of NAMES."""
    before = json.loads(path.read_text() or "{}") if path.exists() else {}
    former = [] if before.get("quick", True) else before["rows"]
    found = {row["name"]: row for row in (*former, *rows)}
    return [found[name] for name in NAMES if name in found]


def _print(row: dict[str, Any], found: Verdict) -> None:
    for each in row["grid"]:
        _line(each)
    predicted = row["predicted"]
    print(f"  in turns; of the choice {predicted['rate']:,.0f} tokens/s and {predicted['age']:.2f} are predicted:")
    for each in row["turns"]:
        _line(each, "(the choice) " if each["overrides"] == row["choice"] else "")
    print(f"{row['name']}: {found.of_medians} of the best, {' '.join(found.best)}")
    print(f"  {found.in_rounds} as the median of the rounds' ratios", flush=True)


def _line(each: dict[str, Any], mark: str = "") -> None:
    runs = f"{len(each['rates'])} runs" if len(each["rates"]) > 1 else "a run"
    rate = f"{statistics.median(each['rates']):8,.0f} tokens/s in {runs}"
    print(f"  {rate}, mean age {each['age']:.2f}: {mark}{' '.join(each['overrides'])}")


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
    verdicts: dict[str, Verdict] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="streamrl-tune-") as own:
        root = (options.folder or (Path(own) if options.quick else Path("runs/bench-tune"))).absolute()
        for name in options.only or NAMES[: 1 if options.quick else None]:
            with bench(name, root / name, form) as benched:
                verdicts[name], row = benched.run()
                rows.append(row)
    missed = [name for name, found in verdicts.items() if found.least < BAR]
    if options.json is not None:
        content = {"quick": options.quick, "rows": rows if options.quick else joined(options.json, rows)}
        content["ratios"] = [
            {"name": f"choice of the best, {row['name']}{how}", "median": of.value, "low": of.low, "high": of.high}
            for row in content["rows"]
            for found in (judged(row)[1],)
            for how, of in (("", found.of_medians), (", in rounds", found.in_rounds))
        ]
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.quick:
        print(f"the bar of {BAR} is not judged in the quick form")
        return 0
    print(f"bar {BAR}: {'MISSED by ' + ', '.join(missed) if missed else 'held'}")
    return 1 if missed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one configuration, two settings, short runs; no bar")
    parser.add_argument("--only", choices=NAMES, nargs="+", help="some of the configurations")
    parser.add_argument("--rounds", type=int, help="of the turns that are judged (default: 9, quick 1)")
    parser.add_argument(
        "--folder", type=output_folder, help="where runs and results are kept (default: runs/bench-tune)"
    )
    parser.add_argument("--json", type=output_file, help="write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())

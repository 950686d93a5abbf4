"""Every benchmark, one after another: one JSON, one table, and which ratios fell since a stored run.

    python -m benchmarks.suite [--quick] [--only NAME ...] [--json FILE] [--store] [--against FILE]
                               [--profile py-spy|torch|cprofile]

A benchmark fails by its own exit code: it checks its bars itself. A ratio, which is always "higher is better", has
fallen when its whole range, smallest to largest of the repeats, lies below the range of the stored one. Only ratios are
compared, and only with the same kind of machine (processor, cores, GPU) and the same form, quick or full: what a
benchmark takes in seconds says more about the machine than about the code.

`--store` keeps the result in benchmarks/stored/, where the next run on such a machine finds it. Exit code 1 for a
benchmark that failed and for a ratio that fell.

`--profile` writes what each benchmark spends its time on into --profiles: py-spy samples all of its processes,
torch and cprofile see its first process alone (cprofile takes py-spy's place where that is not installed). Profiling
costs time, so that nothing is compared then; py-spy also hides a benchmark's exit code, so that no bar is judged.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from streamrl.whole_files import write_whole

STORED = Path(__file__).parent / "stored"
TIMEOUT = 7200.0  # seconds of one benchmark
WIDTH = 120  # columns of the table where there is no terminal
WAYS = ("py-spy", "torch", "cprofile")


@dataclass(frozen=True, slots=True)
class Ratio:
    """A quotient of two measurements of one run, higher is better: the median over its repeats, and their ends."""

    name: str
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, name: str, values: Sequence[float]) -> Ratio:
        return cls(name, statistics.median(values), min(values), max(values))

    @classmethod
    def spread(cls, name: str, median: float, spread: float) -> Ratio:
        """From (max - min) / median, which says how far apart the ends are: taken as equally far from the median."""
        return cls(name, median, max(0.0, median * (1 - spread / 2)), median * (1 + spread / 2))

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} .. {self.high:.3g})"


Figures = Mapping[str, Any]  # the JSON of one benchmark


def _stated(figures: Figures) -> Iterator[Ratio]:
    """Those that the JSON names: `"ratios": [{"name", "median", "low", "high"}]`."""
    for each in figures.get("ratios", ()):
        yield Ratio(each["name"], each["median"], each["low"], each["high"])


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module of this package, how its short form is asked for, and where its ratios are in its JSON."""

    name: str
    quick: tuple[str, ...] = ("--quick",)
    ratios: Callable[[Figures], Iterator[Ratio]] = _stated


def _rollout_path(figures: Figures) -> Iterator[Ratio]:
    for row in figures["rows"]:
        for path in ("stream", "curve"):
            yield Ratio.spread(f"{path} of raw, {row['tokens']} tokens", row[path]["ratio"], row[path]["ratio_spread"])


def _replay(figures: Figures) -> Iterator[Ratio]:
    for row in figures["journal"]:
        for which in ("plain", "synced"):
            name = f"journal of {which} write, {row['tokens']} tokens"
            yield Ratio.spread(name, row[f"ratio_{which}"], row[f"ratio_{which}_spread"])


def _learner(figures: Figures) -> Iterator[Ratio]:
    for row in figures["rows"]:
        for part in ("passes", "step"):
            ratio = row[part]["of_bare"]
            yield Ratio.spread(f"{part} of bare, {row['shape']}", ratio["median"], ratio["spread"])


def _generation(figures: Figures) -> Iterator[Ratio]:
    for row in figures["rows"]:
        yield Ratio.spread(f"worker of bare client, {row['in_flight']} in flight", row["ratio"], row["ratio_spread"])


BENCHMARKS = (
    Benchmark("rollout_path", ratios=_rollout_path),
    Benchmark("fuzz_decoder"),
    Benchmark("adversary"),
    Benchmark("fuzz_rewards"),
    Benchmark("replay", ratios=_replay),
    Benchmark("losses"),
    Benchmark("packing"),
    Benchmark("parity"),
    Benchmark("families"),
    Benchmark("learner", ratios=_learner),
    Benchmark("faults", quick=("--kills", "20")),
    Benchmark("model_check"),
    Benchmark("pressure"),
    Benchmark("release"),
    Benchmark("publish"),
    Benchmark("generation", ratios=_generation),
    Benchmark("mismatch"),
    Benchmark("end_to_end"),
    Benchmark("tune"),
    Benchmark("peers", quick=("--quick", "--python", sys.executable)),  # the environment for development has TRL too
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What makes two figures comparable."""

    processor: str
    cores: int
    gpu: str  # empty: none

    @property
    def slug(self) -> str:
        """As a file name."""
        words = f"{self.processor} {self.cores} cores {self.gpu}".lower()
        return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


@dataclass(slots=True)
class Outcome:
    """What one benchmark gave."""

    exit_code: int
    seconds: float
    ratios: list[Ratio] = field(default_factory=list)
    figures: Figures = field(default_factory=dict)


def this_machine() -> Machine:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    gpu = ""
    if tool := shutil.which("nvidia-smi"):
        told = subprocess.run([tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
        gpus = told.stdout.split("\n")[:-1] if told.returncode == 0 else []
        gpu = f"{len(gpus)} x {gpus[0]}" if gpus else ""
    return Machine(names[0] if names else platform.machine(), os.cpu_count() or 1, gpu)


def run(benchmark: Benchmark, *, quick: bool, profile: str | None, profiles: Path) -> Outcome:
    """Run one in a process of its own, its output to this one's. What it wrote before it failed counts."""
    print(f"\n== {benchmark.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "figures.json"
        arguments = [*(benchmark.quick if quick else ()), "--json", str(target)]
        began = time.monotonic()
        try:
            code = subprocess.run(command(benchmark.name, arguments, profile, profiles), timeout=TIMEOUT).returncode
        except subprocess.TimeoutExpired:
            print(f"{benchmark.name} took more than {TIMEOUT:g} s", file=sys.stderr)
            code = 124
        seconds = time.monotonic() - began
        print(f"== {benchmark.name}: exit code {code} after {seconds:.0f} s", flush=True)
        figures = json.loads(target.read_text()) if target.exists() else {}
    if profile == "py-spy":
        code = 0 if figures else 1  # its own exit code says nothing about the benchmark's
    outcome = Outcome(code, seconds, [], figures)
    try:
        outcome.ratios += benchmark.ratios(figures) if figures else ()
    except (KeyError, TypeError) as error:  # the benchmark's JSON has changed: the others' results still count
        print(f"{benchmark.name}: its ratios are not where the suite looks for them ({error!r})", file=sys.stderr)
        outcome.exit_code = outcome.exit_code or 1
    return outcome


def command(name: str, arguments: Sequence[str], profile: str | None, profiles: Path) -> list[str]:
    """The command line of a benchmark, under a profiler where one is asked for."""
    module = f"benchmarks.{name}"
    if profile is None:
        return [sys.executable, "-m", module, *arguments]
    profiles.mkdir(parents=True, exist_ok=True)
    if profile == "py-spy":
        record = ["py-spy", "record", "--subprocesses", "--output", str(profiles / f"{name}.svg")]
        return [*record, "--", sys.executable, "-m", module, *arguments]
    return [sys.executable, "-m", "benchmarks.profiled", profile, str(profiles / name), module, *arguments]


def profiler(wanted: str | None) -> str | None:
    """What is used for it here: py-spy only where it is installed."""
    if wanted == "py-spy" and shutil.which("py-spy") is None:
        print("py-spy is not installed: cProfile takes its place (the first process of each benchmark alone)")
        return "cprofile"
    return wanted


def fell(now: Ratio, before: Ratio) -> bool:
    """Whether it is lower by more than both spreads explain."""
    return now.high < before.low


def comparable(stored: Mapping[str, Any], machine: Machine, quick: bool) -> str:
    """Empty where figures of here may be compared with the stored ones, else why they may not."""
    if stored["machine"] != asdict(machine):
        return f"it is of another machine: {Machine(**stored['machine']).slug}, this one is {machine.slug}"
    if stored["quick"] != quick:
        return "one is the quick form, the other the full one"
    return ""


def stored_ratios(stored: Mapping[str, Any]) -> dict[tuple[str, str], Ratio]:
    """(benchmark, ratio): what was stored."""
    return {
        (name, each["name"]): Ratio(**each)
        for name, outcome in stored["benchmarks"].items()
        for each in outcome["ratios"]
    }


def table(outcomes: Mapping[str, Outcome], before: Mapping[tuple[str, str], Ratio]) -> Table:
    """One line for each ratio, or for the benchmark where it has none."""
    drawn = Table("benchmark", "", "seconds", "ratio", "now", "stored", "")
    for column in (2, 4, 5):
        drawn.columns[column].justify = "right"
    for name, outcome in outcomes.items():
        verdict = "ok" if outcome.exit_code == 0 else f"FAILED ({outcome.exit_code})"
        head = (name, verdict, f"{outcome.seconds:.0f}")
        if not outcome.ratios:
            drawn.add_row(*head, "", "", "", "")
        for ratio in outcome.ratios:
            old = before.get((name, ratio.name))
            fallen = old is not None and fell(ratio, old)
            drawn.add_row(*head, ratio.name, str(ratio), str(old or ""), "FELL" if fallen else "")
            head = ("", "", "")
    return drawn


def main() -> int:
    options = _parse()
    machine, way = this_machine(), profiler(options.profile)
    chosen = [each for each in BENCHMARKS if not options.only or each.name in options.only]
    before = {} if way else _stored(options, machine)
    outcomes = {each.name: run(each, quick=options.quick, profile=way, profiles=options.profiles) for each in chosen}
    console = Console()
    print()
    (console if console.is_terminal else Console(width=WIDTH)).print(table(outcomes, before))
    result = {
        "machine": asdict(machine),
        "quick": options.quick,
        "profile": way,
        "time": time.time(),
        "benchmarks": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }
    _write(options.json, result)
    if options.store:
        _store(_stored_path(machine), result)
    if way:
        print(f"profiles in {options.profiles}; nothing was compared")
    failed = [name for name, outcome in outcomes.items() if outcome.exit_code]
    fallen = [
        f"{name}: {ratio.name}"
        for name, outcome in outcomes.items()
        for ratio in outcome.ratios
        if (old := before.get((name, ratio.name))) is not None and fell(ratio, old)
    ]
    print(f"failed: {', '.join(failed) or 'none'}; fallen: {', '.join(fallen) or 'none'}; {options.json}")
    return 1 if failed or fallen else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--quick", action="store_true", help="the short form of each")
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}")
    parser.add_argument("--json", type=Path, default=Path("runs/bench.json"), help="the result (default: %(default)s)")
    parser.add_argument("--store", action="store_true", help="keep the result for later comparisons")
    parser.add_argument("--against", type=Path, help="compare with this one (default: the stored one, if any)")
    parser.add_argument("--profile", choices=WAYS, help="also write where the time goes")
    parser.add_argument("--profiles", type=Path, default=Path("runs/profiles"), help="folder for it")
    return parser.parse_args()


def _stored_path(machine: Machine) -> Path:
    return STORED / f"{machine.slug}.json"


def _stored(options: argparse.Namespace, machine: Machine) -> dict[tuple[str, str], Ratio]:
    """The ratios to compare with; none, told, where there is nothing that may be compared."""
    path = options.against or _stored_path(machine)
    if not path.exists():
        print(f"nothing to compare with: {path} is not there")
        return {}
    stored = json.loads(path.read_text())
    if reason := comparable(stored, machine, options.quick):
        print(f"{path} is not compared with: {reason}")
        return {}
    return stored_ratios(stored)


def _store(path: Path, result: Mapping[str, Any]) -> None:
    """Keep what was measured now, beside what is stored of benchmarks that were left out now."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    same = kept.get("quick") == result["quick"]
    benchmarks = {**(kept["benchmarks"] if same else {}), **result["benchmarks"]}
    _write(path, {**result, "benchmarks": benchmarks})
    print(f"stored in {path}")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())

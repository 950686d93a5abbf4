"""What the runs of a sweep add up to: figures of each point over its seeds, as JSON, in a table, in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from streamrl.lab.sweep.differences import COMPARED, Difference, difference, ratio
from streamrl.lab.sweep.estimates import Estimate, estimate
from streamrl.lab.sweep.figures import TO_TARGET, Rows, figures, figures_of, staleness_shares
from streamrl.lab.sweep.plan import Job, Point, Sweep
from streamrl.lab.sweep.runner import is_done, steps_of
from streamrl.observe.metrics import read_metrics
from streamrl.whole_files import write_whole

Runs = Mapping[int, Mapping[str, float]]  # figures of a point by seed


@dataclass(frozen=True, slots=True)
class Outcome:
    """One point with what its finished runs have."""

    point: Point
    rows: dict[int, Rows]  # seed: metrics of a finished run
    runs: dict[int, dict[str, float]]  # seed: its figures
    unfinished: dict[int, int]  # seed: learner steps of a run that is not finished, 0 of one that has not begun
    figures: dict[str, Estimate]  # by name, over the seeds
    staleness: dict[str, float]  # share of the trained tokens of each age bucket, mean of the seeds


def in_table(columns: Sequence[str], target: float | None) -> tuple[str, ...]:
    """Names of the figures that a table of points has, or one of their ratios."""
    return tuple(columns) if target is None else (*columns, *TO_TARGET)


def collect(sweep: Sweep, jobs: Sequence[Job]) -> list[Outcome]:
    """What there is in the run folders, point by point in the order of the sweep."""
    points: dict[str, list[Job]] = {}
    for job in jobs:
        points.setdefault(job.point.name, []).append(job)
    return [_outcome(each, sweep.target) for each in points.values()]


def _outcome(jobs: Sequence[Job], target: float | None) -> Outcome:
    done: dict[int, Rows] = {job.seed: list(read_metrics(job.config.run_folder)) for job in jobs if is_done(job)}
    runs = {seed: figures(rows, target) for seed, rows in done.items()}
    shares = [staleness_shares(rows) for rows in done.values()]
    buckets = shares[0] if shares else ()
    return Outcome(
        point=jobs[0].point,
        rows=done,
        runs=runs,
        unfinished={job.seed: steps_of(job) for job in jobs if job.seed not in done},
        figures=estimates(runs, target),
        staleness={bucket: sum(share[bucket] for share in shares) / len(shares) for bucket in buckets},
    )


def estimates(runs: Runs, target: float | None = None) -> dict[str, Estimate]:
    """The estimate of every figure, over the seeds of a point that have it. `runs`: figures by seed."""
    return {
        figure.name: found
        for figure in figures_of(target)
        if (found := estimate([each[figure.name] for each in runs.values() if figure.name in each])) is not None
    }


def differences(runs: Runs, baseline: Runs) -> dict[str, Difference]:
    """The difference of each figure in COMPARED from a baseline point. Both arguments: figures by seed."""
    return {
        name: found
        for name in COMPARED
        if (found := difference(_by_seed(runs, name), _by_seed(baseline, name))) is not None
    }


def _by_seed(runs: Runs, name: str) -> dict[int, float]:
    return {seed: each[name] for seed, each in runs.items() if name in each}


def save(sweep: Sweep, outcomes: Sequence[Outcome]) -> None:
    """Write `results.json` and `results.md` into the sweep's folder."""
    runs = _runs(outcomes)
    meanings = [{"name": each.name, "unit": each.unit, "meaning": each.meaning} for each in figures_of(sweep.target)]
    content = {
        "sweep": sweep.name,
        "base": str(sweep.base),
        "common": list(sweep.common),
        "axis": sweep.axis,
        "baseline": sweep.baseline,
        "target": sweep.target,
        "columns": list(sweep.columns),
        "ratios": list(sweep.ratios),
        "seeds": list(sweep.seeds),
        "figures": meanings,
        "points": [_as_json(outcome, runs[outcome.point.baseline]) for outcome in outcomes],
    }
    write_whole(sweep.folder / "results.json", json.dumps(content, indent=1) + "\n")
    write_whole(sweep.folder / "results.md", markdown(sweep, outcomes))


def tables(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Table]:
    """The points and their figures; where there is more than one point, their differences from the baseline."""
    drawn = [_drawn(f"{sweep.name}: {legend(sweep)}", _cells(sweep, outcomes))]
    return drawn + [_drawn(title, cells) for title, cells in _compared(sweep, outcomes)]


def _compared(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[tuple[str, list[list[str]]]]:
    """The tables of comparisons with the baseline that there are, with their legends."""
    runs, baselines = _runs(outcomes), {each.point.name: each.point.baseline for each in outcomes}
    baseline = sweep.baseline if sweep.baseline in runs else f"{sweep.baseline} of the same grid values"
    found = [(difference_legend(baseline), difference_cells(baselines, runs))]
    if compared := in_table(sweep.ratios, sweep.target):
        found.append((ratio_legend(baseline, sweep.target), ratio_cells(baselines, runs, compared)))
    return [(legend, cells) for legend, cells in found if cells]


def _drawn(title: str, cells: Sequence[Sequence[str]]) -> Table:
    head, *rows = cells
    drawn = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in head:
        drawn.add_column(
            name.replace(", ", "\n"), justify="left" if name == "point" else "right", no_wrap=name == "point"
        )
    for row in rows:
        drawn.add_row(*row)
    return drawn


def markdown(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    """The same tables for a document."""
    parts = [_markdown(_cells(sweep, outcomes)), f"{legend(sweep)}."]
    for title, cells in _compared(sweep, outcomes):
        parts += [_markdown(cells), f"{title}."]
    return "\n\n".join(parts) + "\n"


def _markdown(cells: Sequence[Sequence[str]]) -> str:
    head, *rows = (" | ".join(row) for row in cells)
    rule = "---|" * len(cells[0])
    return "\n".join([f"| {head} |", f"|{rule}", *(f"| {row} |" for row in rows)])


def legend(sweep: Sweep) -> str:
    """What the figures are over."""
    if len(sweep.seeds) == 1:
        return "one seed, so that no figure has an interval: a difference may be chance"
    return f"mean ± half of the 95 % confidence interval over {len(sweep.seeds)} seeds (Student's t)"


def difference_legend(baseline: str) -> str:
    """What the differences are of."""
    return (
        f"difference from {baseline} with the same seed: mean ± half of the 95 % confidence interval (Student), its "
        "ends, and those of the bootstrap"
    )


def ratio_legend(baseline: str, target: float | None) -> str:
    """What the ratios are of."""
    taken = "" if target is None else f", where both reach a reward of {target:g} for what it took"
    return (
        f"ratio to {baseline} with the same seed: geometric mean over the seeds{taken}, the ends of its 95 % "
        "confidence interval (Student), and those of the bootstrap"
    )


def missing(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each run that is in no figure."""
    return [
        f"{outcome.point.name}, seed {seed}: not in the figures, {steps} steps done"
        for outcome in outcomes
        for seed, steps in outcome.unfinished.items()
    ]


def difference_cells(baselines: Mapping[str, str], points: Mapping[str, Runs]) -> list[list[str]]:
    """A head, and a row for each point that has a seed in common with its baseline; empty without such a point.

    `baselines`: the name of each point's, its own where it is one; `points`: figures by seed, by the points' names.
    """
    rows = []
    for name, baseline, runs in _others(baselines, points):
        if found := differences(runs, baseline):
            pairs = sum(seed in baseline for seed in runs)
            row = [name, str(pairs)]
            for figure in COMPARED:
                each = found.get(figure)
                mean = f"{each.estimate}{_of(each.estimate.seeds, pairs)}" if each else "-"
                row += [mean, each.student, each.bootstrap] if each else ["-"] * 3
            rows.append(row)
    return _with_head(COMPARED, rows)


def ratio_cells(baselines: Mapping[str, str], points: Mapping[str, Runs], figures: Sequence[str]) -> list[list[str]]:
    """The same of ratios of these figures, the number of seeds behind those that fewer have; empty where no point has
    one with its baseline.
    """
    rows = []
    for name, baseline, runs in _others(baselines, points):
        found = [ratio(_by_seed(runs, figure), _by_seed(baseline, figure)) for figure in figures]
        if any(found):
            pairs = sum(seed in baseline for seed in runs)
            row = [name, str(pairs)]
            for each in found:
                mean, *ends = each.cells() if each else ["-"] * 3
                row += [f"{mean}{_of(each.seeds, pairs)}" if each else mean, *ends]
            rows.append(row)
    return _with_head(figures, rows)


def _of(seeds: int, pairs: int) -> str:
    """Behind a mean that fewer pairs have than there are."""
    return "" if seeds == pairs else f" ({seeds}/{pairs})"


def _others(baselines: Mapping[str, str], points: Mapping[str, Runs]) -> Iterator[tuple[str, Runs, Runs]]:
    """Each point that is not its own baseline: its name, the figures of the baseline, and its own."""
    return ((name, points[baselines[name]], runs) for name, runs in points.items() if baselines[name] != name)


def _with_head(figures: Sequence[str], rows: list[list[str]]) -> list[list[str]]:
    """Each figure with its two intervals; empty without a row."""
    head = ["point", "pairs", *(name for figure in figures for name in (figure, "Student", "bootstrap"))]
    return [head, *rows] if rows else []


def _runs(outcomes: Sequence[Outcome]) -> dict[str, dict[int, dict[str, float]]]:
    """Figures by seed, by the points' names."""
    return {each.point.name: each.runs for each in outcomes}


def _cells(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[list[str]]:
    units = {figure.name: figure.unit for figure in figures_of(sweep.target)}
    names = in_table(sweep.columns, sweep.target)
    head = ["point", "seeds", *(f"{name}, {units[name]}" if units[name] else name for name in names)]
    rows = [
        [
            outcome.point.name,
            f"{len(outcome.rows)} of {len(outcome.rows) + len(outcome.unfinished)}",
            *(cell(outcome.figures.get(name), len(outcome.rows)) for name in names),
        ]
        for outcome in outcomes
    ]
    return [head, *rows]


def cell(found: Estimate | None, runs: int) -> str:
    """An estimate, and where not all `runs` have the figure, how many do."""
    if found is None:
        return "-"
    return str(found) if found.seeds == runs else f"{found} ({found.seeds}/{runs})"


def _as_json(outcome: Outcome, baseline: Runs) -> dict[str, Any]:
    return {
        "name": outcome.point.name,
        "column": outcome.point.column,
        "series": outcome.point.series,
        "settings": outcome.point.settings,
        "baseline": outcome.point.baseline,
        "runs": {str(seed): each for seed, each in outcome.runs.items()},
        "unfinished": {str(seed): steps for seed, steps in outcome.unfinished.items()},
        "figures": {
            name: {"mean": each.mean, "half_width": each.half_width, "seeds": each.seeds}
            for name, each in outcome.figures.items()
        },
        "differences": {
            name: {
                "mean": each.estimate.mean,
                "half_width": each.estimate.half_width,
                "bootstrap": [each.low, each.high],
                "seeds": each.estimate.seeds,
            }
            for name, each in differences(outcome.runs, baseline).items()
        },
        "staleness": outcome.staleness,
    }

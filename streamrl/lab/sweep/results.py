"""What the runs of a sweep add up to: figures of each point over its seeds, as JSON, in a table, in Markdown."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from streamrl.lab.sweep.estimates import Estimate, estimate
from streamrl.lab.sweep.figures import FIGURES, Rows, figures, staleness_shares
from streamrl.lab.sweep.plan import Job, Point, Sweep
from streamrl.lab.sweep.runner import is_done, steps_of
from streamrl.observe.metrics import read_metrics

# The others are in results.json and in the plots: a table of all is wider than a screen.
IN_TABLE = ("reward", "reward over the run", "trained", "staleness", "ESS", "KL", "clipped", "masked")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One point with what its finished runs have."""

    point: Point
    rows: dict[int, Rows]  # seed: metrics of a finished run
    unfinished: dict[int, int]  # seed: learner steps of a run that is not finished, 0 of one that has not begun
    figures: dict[str, Estimate]  # by name, over the seeds
    staleness: dict[str, float]  # share of the trained tokens of each age bucket, mean of the seeds


def collect(jobs: Sequence[Job]) -> list[Outcome]:
    """What there is in the run folders, point by point in the order of the sweep."""
    points: dict[str, list[Job]] = {}
    for job in jobs:
        points.setdefault(job.point.name, []).append(job)
    return [_outcome(each) for each in points.values()]


def _outcome(jobs: Sequence[Job]) -> Outcome:
    done: dict[int, Rows] = {job.seed: list(read_metrics(job.config.run_folder)) for job in jobs if is_done(job)}
    of_seeds = [figures(rows) for rows in done.values()]
    estimates = {
        figure.name: found
        for figure in FIGURES
        if (found := estimate([each[figure.name] for each in of_seeds if figure.name in each])) is not None
    }
    shares = [staleness_shares(rows) for rows in done.values()]
    buckets = shares[0] if shares else ()
    return Outcome(
        point=jobs[0].point,
        rows=done,
        unfinished={job.seed: steps_of(job) for job in jobs if job.seed not in done},
        figures=estimates,
        staleness={bucket: sum(share[bucket] for share in shares) / len(shares) for bucket in buckets},
    )


def save(sweep: Sweep, outcomes: Sequence[Outcome]) -> None:
    """Write `results.json` and `results.md` into the sweep's folder."""
    content = {
        "sweep": sweep.name,
        "base": str(sweep.base),
        "common": list(sweep.common),
        "seeds": list(sweep.seeds),
        "figures": [{"name": each.name, "unit": each.unit, "meaning": each.meaning} for each in FIGURES],
        "points": [_as_json(outcome) for outcome in outcomes],
    }
    _write(sweep.folder / "results.json", json.dumps(content, indent=1) + "\n")
    _write(sweep.folder / "results.md", markdown(sweep, outcomes))


def table(sweep: Sweep, outcomes: Sequence[Outcome]) -> Table:
    """The points and their figures."""
    head, *rows = _cells(outcomes)
    drawn = Table(title=f"{sweep.name}: {legend(sweep)}", title_justify="left", box=SIMPLE_HEAD)
    for name in head:
        drawn.add_column(
            name.replace(", ", "\n"), justify="left" if name == "point" else "right", no_wrap=name == "point"
        )
    for row in rows:
        drawn.add_row(*row)
    return drawn


def markdown(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    """The same table for a document."""
    head, *rows = (" | ".join(cells) for cells in _cells(outcomes))
    rule = "---|" * len(_cells(outcomes)[0])
    lines = [f"| {head} |", f"|{rule}", *(f"| {row} |" for row in rows)]
    return "\n".join([*lines, "", f"{legend(sweep)}.", ""])


def legend(sweep: Sweep) -> str:
    """What the figures are over."""
    if len(sweep.seeds) == 1:
        return "one seed, so that no figure has an interval: a difference may be chance"
    return f"mean ± half of the 95 % confidence interval over {len(sweep.seeds)} seeds (Student's t)"


def missing(outcomes: Sequence[Outcome]) -> list[str]:
    """A line for each run that is in no figure."""
    return [
        f"{outcome.point.name}, seed {seed}: not in the figures, {steps} steps done"
        for outcome in outcomes
        for seed, steps in outcome.unfinished.items()
    ]


def _cells(outcomes: Sequence[Outcome]) -> list[list[str]]:
    units = {figure.name: figure.unit for figure in FIGURES}
    head = ["point", "seeds", *(f"{name}, {units[name]}" if units[name] else name for name in IN_TABLE)]
    rows = [
        [
            outcome.point.name,
            f"{len(outcome.rows)} of {len(outcome.rows) + len(outcome.unfinished)}",
            *(str(outcome.figures.get(name, "-")) for name in IN_TABLE),
        ]
        for outcome in outcomes
    ]
    return [head, *rows]


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "name": outcome.point.name,
        "column": outcome.point.column,
        "series": outcome.point.series,
        "settings": outcome.point.settings,
        "runs": {str(seed): figures(rows) for seed, rows in outcome.rows.items()},
        "unfinished": {str(seed): steps for seed, steps in outcome.unfinished.items()},
        "figures": {
            name: {"mean": each.mean, "half_width": each.half_width, "seeds": each.seeds}
            for name, each in outcome.figures.items()
        },
        "staleness": outcome.staleness,
    }


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)

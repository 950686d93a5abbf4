"""`streamrl report RUN [RUN ...]`: read what the runs recorded, write the page.

    config.yaml, environment.json ──▶ settings ─┐
    metrics.jsonl ──▶ curves                    │
    events/       ──▶ time use, notes           ├──▶ one JSON ──▶ RUN/report.html
    journal/      ──▶ groups, samples           │
    weights/      ──▶ log-prob ratios          ─┘

Nothing of a run is changed; one that is going on, or was killed, is reported as far as it came.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from streamrl.config.file import ConfigError
from streamrl.lab.output import check_file
from streamrl.lab.report import curves, samples, settings, time_use
from streamrl.lab.report.groups import read_groups
from streamrl.lab.report.page import render
from streamrl.lab.report.ratios import add_ratios
from streamrl.lab.report.runs import Run, read_runs
from streamrl.observe.bars import Bar
from streamrl.observe.hints import hints_of
from streamrl.observe.remarks import steps
from streamrl.whole_files import write_whole

Ratios = Literal["auto", "yes", "no"]

SECTIONS = 4  # of a run that take long: its records, groups, samples and ratios


def main(run_folders: Sequence[Path], output: Path | None = None, ratios: Ratios = "auto") -> int:
    """Write the page and print its path. `output` None: `report.html` in the first run's folder. Returns 0.

    ratios: whether the log-prob ratios of the shown tokens are computed from the kept weights (`ratios.py`).
    Raises ConfigError for a folder that is no run, or a page that cannot be written.
    """
    if len({folder.resolve() for folder in run_folders}) < len(run_folders):
        raise ConfigError("report: the same run twice; allowed: each RUN once")
    target = output or run_folders[0] / "report.html"
    check_file("--output", target)
    with Bar("report", "sections", SECTIONS * len(run_folders)) as bar:
        runs = read_runs(run_folders)
        bar.advance(len(runs))
        described = [describe(run, len(runs), ratios, bar) for run in runs]
    data = {
        "made": time.time(),
        "panels": curves.panels(described),
        "differences": settings.differences(runs),
        "runs": described,
    }
    size = _write(target, render(data))
    print(f"{target}  ({size / 1e6:.1f} MB)")
    return 0


def describe(run: Run, runs: int, ratios: Ratios, bar: Bar) -> dict[str, Any]:
    """All that the page says about one run, as JSON. `runs`: how many share the page, and its size."""
    groups = read_groups(run)
    bar.advance()
    shown = samples.choose(run, groups, runs)
    groups.report_missing()
    bar.advance()
    source = add_ratios(run, shown, ratios)
    bar.advance()
    return {
        "name": run.name,
        "folder": str(run.folder),
        "status": run.status,
        "is_well": run.is_well,
        "figures": run.figures(),
        "begin": run.begin,
        "curves": curves.describe(run, runs),
        "groups": groups.describe(),
        "time": time_use.describe(run),
        "hints": [
            {"steps": steps(hint), "text": hint.text, "keys": hint.rule.keys, "link": hint.rule.link}
            for hint in hints_of(run.rows)
        ],
        "notes": [note.describe(run.begin) for note in run.notes],
        "samples": samples.describe(run, shown, source),
        "settings": settings.describe(run),
    }


def _write(target: Path, page: str) -> int:
    """Put the page in place as a whole. Returns its size in bytes."""
    content = page.encode()
    try:
        write_whole(target, content)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}; allowed: a file that can be written") from None
    return len(content)

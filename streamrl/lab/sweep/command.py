"""`streamrl sweep FILE`: runs what is not done, then writes one table, the pictures and results.json."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rich.console import Console

from streamrl import preflight
from streamrl.config.file import ConfigError
from streamrl.hub.model import with_local_models
from streamrl.lab.sweep import plots, results
from streamrl.lab.sweep.plan import Job, Sweep, read
from streamrl.lab.sweep.runner import INTERRUPTED, Interrupted, Train, command_lines, run_jobs, to_do
from streamrl.lifeline import unwinding_at_sigterm
from streamrl.locks import await_roles, locked
from streamrl.places import from_here, program, set_aside

WIDTH = 180  # columns of the table where there is no terminal

# What is wanted: runs and results, the command lines of the runs, or the results of what is there.
Part = Literal["all", "jobs", "results"]


def main(file: Path, overrides: Sequence[str], train: Train, *, part: Part = "all", fresh: bool = False) -> int:
    """Run a sweep, or go on with it. `train` makes one run.

    Returns 0, 1 when a run failed or is missing, or 130 after a signal. Raises ConfigError, before anything is
    started, for a point that is no valid configuration.
    """
    if fresh and part != "all":
        raise ConfigError("--fresh: nothing is started here; allowed: without --print-jobs, --results")
    sweep = read(file, overrides)
    jobs = sweep.jobs(fresh=fresh)
    if part == "jobs":
        print("\n".join(command_lines(sweep, jobs)))
        return 0
    failed: list[str] = []
    if part == "all":
        _check(jobs, fresh=fresh)
        try:
            with _claimed(sweep.folder), unwinding_at_sigterm(lambda number: Interrupted()):
                failed = _run(sweep, jobs, train, fresh=fresh)
        except (Interrupted, KeyboardInterrupt):
            again = shlex.join([program(), "sweep", str(file), *overrides])
            print(f"streamrl: interrupted; this goes on with it: {from_here()}{again}", file=sys.stderr)
            return INTERRUPTED
    else:
        print(to_do(sweep, jobs), flush=True)
    incomplete = _conclude(sweep, jobs)
    if failed:
        print(f"streamrl: {len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed or incomplete else 0


def _run(sweep: Sweep, jobs: Sequence[Job], train: Train, *, fresh: bool) -> list[str]:
    """Run what is not done. Returns the names of the jobs that failed. Raises Interrupted."""
    if fresh and sweep.folder.exists():
        for job in jobs:
            await_roles(job.config.run_folder, job.config.run.start_timeout)
        set_aside(sweep.folder)
    sweep.folder.mkdir(parents=True, exist_ok=True)
    print(to_do(sweep, jobs), flush=True)
    return run_jobs(sweep, jobs, train)


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """The folder of a sweep, for one process alone. Raises ConfigError where another one runs the sweep."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        claim = locked(folder.parent / f".{folder.name}.lock")  # beside it, as the folder may be renamed
    except OSError as error:
        raise ConfigError(f"folder: {folder}: {error.strerror}; allowed: a folder that may be written") from None
    if claim is None:
        raise ConfigError(f"name: {folder} is in use by another `streamrl sweep`; allowed: another name")
    try:
        yield
    finally:
        os.close(claim)


def _check(jobs: Sequence[Job], *, fresh: bool) -> None:
    """Every point, before the first one runs: seeds change nothing of what is checked. Raises ConfigError."""
    for job in {job.point.name: job for job in reversed(jobs)}.values():
        try:
            preflight.check_start(with_local_models(job.config), fresh=fresh)
        except ConfigError as error:
            raise ConfigError("\n".join(f"point {job.point.name}: {line}" for line in error.lines)) from None


def _conclude(sweep: Sweep, jobs: Sequence[Job]) -> bool:
    """Print and write the results. Returns whether runs are missing in them."""
    outcomes = results.collect(sweep, jobs)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(*results.tables(sweep, outcomes))
    missing = results.missing(outcomes)
    for line in missing:
        print(line)
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
        results.save(sweep, outcomes)
        for file in (sweep.folder / "results.json", sweep.folder / "results.md", *plots.draw(sweep, outcomes)):
            print(f"  {file}")
    except OSError as error:  # of another user, whose runs may be read
        print(f"streamrl: {sweep.folder}: its results are not written: {error.strerror}", file=sys.stderr)
        return True
    return bool(missing)

"""`streamrl journal RUN`: which segments there are, what state the groups are in, and whether every byte is whole."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

from streamrl.config.file import ConfigError
from streamrl.lab.journal_export import FORMATS, export
from streamrl.lab.output import check_file
from streamrl.observe.bars import Bar
from streamrl.recorded.journal import STATES, RunJournal, Segment, Unreadable, has_journal


def main(run_folder: Path, verify: bool = False, output: Path | None = None) -> int:
    """Show a run's journal, and read every byte of it or export its groups where that is asked for.

    Returns 1 where `verify` found damage, or what was exported is not all, else 0: a torn tail of the newest segment
    is what a kill leaves behind and a running service has while it writes.
    """
    if not has_journal(run_folder):
        raise ConfigError(f"{run_folder / 'journal'}: no segments (journal.keep=none, or nothing was generated yet)")
    check_file("--export", output, tuple(FORMATS))
    if output is not None and output.exists():
        raise ConfigError(f"--export: {output} exists; allowed: a new file")
    with Bar("verify" if verify else "read", "MB") as bar:
        journal = RunJournal(run_folder, verify=verify, report=bar.reach)
    _print(run_folder, journal)
    damaged = _print_problems(journal.segments)
    if verify and not damaged:
        print("  every record and every frame matches its checksum")
    lost: list[str] = []
    if output is not None:
        print(f"  {export(journal, output, lost)} samples written to {output}")
        if lost:
            print(
                f"streamrl: {len(lost)} groups cannot be read and are left out, the first: {lost[0]}", file=sys.stderr
            )
    if damaged and verify:
        print(f"streamrl: {damaged[0]}; {len(damaged)} damaged places in {run_folder / 'journal'}", file=sys.stderr)
    return 1 if lost or (damaged and (verify or output is not None)) else 0


def _print(run_folder: Path, journal: RunJournal) -> None:
    total = sum(segment.size for segment in journal.segments)
    print(f"journal of {run_folder}: {len(journal.segments)} segments, {total / 1e6:.1f} MB")
    print("  segment  begun                     MB   records   groups  frames MB")
    for segment in journal.segments:
        print(
            f"  {segment.number:06d}   {_date(segment.begun)} {segment.size / 1e6:9.2f} {segment.records:9d}"
            f" {segment.groups:8d} {segment.frame_bytes / 1e6:10.2f}"
        )
    print(f"  groups: {', '.join(f'{state} {journal.states[state]}' for state in STATES)}")
    print(f"  tickets {journal.tickets}, dropped {journal.dropped}, quarantined {journal.quarantined}")
    if journal.reused:
        print(f"  uses {journal.uses}, of them {journal.reused} of groups that an earlier step had")
    if steps := journal.steps:
        missing = steps[-1] - steps[0] + 1 - len(steps)
        print(f"  steps {steps[0]} to {steps[-1]}" + (f", {missing} of them not recorded" if missing else ""))
    if journal.began:
        print(f"  learner began at {', '.join(map(str, journal.began))}")


def _date(seconds: float) -> str:
    """Local time; a segment whose first record cannot be read has none."""
    return f"{'?':19}" if math.isnan(seconds) else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _print_problems(surveyed: list[Segment]) -> list[Unreadable]:
    """Tell what cannot be read. Returns what of it is more than the torn tail of the newest segment."""
    damaged = []
    for segment in surveyed:
        for problem in segment.problems:
            print(f"  {problem}")
            if not (problem.torn and segment is surveyed[-1]):
                damaged.append(problem)
    return damaged

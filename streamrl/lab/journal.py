"""`streamrl journal RUN`: which segments there are, what state the groups are in, and whether every byte is whole."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from streamrl.config.file import ConfigError
from streamrl.lab.journal_export import FORMATS, export
from streamrl.lab.output import check_file
from streamrl.replay.history import STATES, Contents
from streamrl.replay.records import Completed
from streamrl.replay.segments import Entry, JournalDamaged, Opening, Unreadable, load_frames, scan, segments


@dataclass(slots=True)
class Segment:
    """One file of the journal."""

    number: int
    size: int  # bytes
    begun: float = float("nan")  # seconds since the epoch
    records: int = 0
    groups: int = 0
    frame_bytes: int = 0
    problems: list[Unreadable] = field(default_factory=list)


def main(run_folder: Path, verify: bool = False, output: Path | None = None) -> int:
    """Show a run's journal, and read every byte of it or export its groups where that is asked for.

    Returns 1 where `verify` found damage, or what was exported is not all, else 0: a torn tail of the newest segment
    is what a kill leaves behind and a running service has while it writes.
    """
    folder = run_folder / "journal"
    if not (found := segments(folder)):
        raise ConfigError(f"{folder}: no segments (journal.keep=none, or nothing was generated yet)")
    check_file("--export", output, tuple(FORMATS))
    if output is not None and output.exists():
        raise ConfigError(f"--export: {output} exists; allowed: a new file")
    contents = Contents()
    surveyed = [_survey(folder, number, path, contents, verify) for number, path in found]
    _print(run_folder, surveyed, contents)
    damaged = _print_problems(surveyed)
    if verify and not damaged:
        print("  every record and every frame matches its checksum")
    lost: list[str] = []
    if output is not None:
        print(f"  {export(folder, contents, output, lost)} samples written to {output}")
        if lost:
            print(
                f"streamrl: {len(lost)} groups cannot be read and are left out, the first: {lost[0]}", file=sys.stderr
            )
    return 1 if lost or (damaged and (verify or output is not None)) else 0


def _survey(folder: Path, number: int, path: Path, contents: Contents, verify: bool) -> Segment:
    segment = Segment(number, path.stat().st_size)
    for entry in scan(number, path):
        if isinstance(entry, Unreadable):
            segment.problems.append(entry)
            continue
        segment.records += 1
        segment.frame_bytes += entry.frame_bytes
        segment.groups += isinstance(entry.record, Completed)
        if isinstance(entry.record, Opening):
            segment.begun = entry.record.time
        else:
            contents.add(entry.record)
        if verify and (problem := _problem(folder, entry, segment.size)):
            segment.problems.append(problem)
    return segment


def _problem(folder: Path, entry: Entry, size: int) -> Unreadable | None:
    """What is wrong with the frames of a record."""
    try:
        load_frames(folder, entry.place)
    except JournalDamaged as error:
        return Unreadable(entry.place, entry.end - entry.place.offset, str(error), torn=entry.end >= size)
    return None


def _print(run_folder: Path, surveyed: list[Segment], contents: Contents) -> None:
    total = sum(segment.size for segment in surveyed)
    print(f"journal of {run_folder}: {len(surveyed)} segments, {total / 1e6:.1f} MB")
    print("  segment  begun                     MB   records   groups  frames MB")
    for segment in surveyed:
        print(
            f"  {segment.number:06d}   {_date(segment.begun)} {segment.size / 1e6:9.2f} {segment.records:9d}"
            f" {segment.groups:8d} {segment.frame_bytes / 1e6:10.2f}"
        )
    count = Counter(contents.state.values())
    print(f"  groups: {', '.join(f'{state} {count[state]}' for state in STATES)}")
    print(f"  tickets {contents.tickets}, dropped {len(contents.dropped)}, quarantined {len(contents.quarantined)}")
    if steps := sorted(contents.steps):
        missing = steps[-1] - steps[0] + 1 - len(steps)
        print(f"  steps {steps[0]} to {steps[-1]}" + (f", {missing} of them not recorded" if missing else ""))
    if contents.began:
        print(f"  learner began at {', '.join(map(str, contents.began))}")


def _date(seconds: float) -> str:
    """Local time; a segment whose first record cannot be read has none."""
    return f"{'?':19}" if math.isnan(seconds) else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _print_problems(surveyed: list[Segment]) -> bool:
    """Tell what cannot be read. True where that is more than the torn tail of the newest segment."""
    damaged = False
    for segment in surveyed:
        for problem in segment.problems:
            print(f"  {problem}")
            damaged |= not (problem.torn and segment is surveyed[-1])
    return damaged

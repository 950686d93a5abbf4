"""Where the time of a run went: what each role did, in slices of the whole run, and who held the run up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from streamrl.lab.report.runs import Run
from streamrl.observe.roofline import HOLDERS, holders, roofline
from streamrl.observe.timeline import Track, slices

# of the time from the run's begin to its end
SLICES = 240

# workers that have a line of their own; of more there is one line, their mean
GENERATORS = 8

Stretch = tuple[float, float, str, float]  # begin, end, name, share of it


def describe(run: Run) -> dict[str, Any] | None:
    """As JSON; None for a run without events. `slices`: name: the share of each slice of the run's time, 0..1."""
    timeline, begin, end = run.timeline, run.begin, run.timeline.end
    if not timeline.tracks or end <= begin:
        return None
    workers = timeline.generators
    others = [track for role, track in sorted(timeline.tracks.items()) if track not in workers]
    lines = [_line(track.role, [track], begin, end) for track in others]
    if len(workers) <= GENERATORS:
        lines += [_line(track.role, [track], begin, end) for track in workers]
    else:
        lines.append(_line(f"{len(workers)} generators, mean", workers, begin, end))
    held = [
        (since, until, holder, share)
        for since, until, shares in holders(timeline, begin, end)
        for holder, share in shares.items()
    ]
    if not workers:  # a run of `streamrl sft`: nobody waits for another one
        held = [(begin, end, "nobody", 1.0)]
    line = roofline(timeline, run.rows)
    return {
        "seconds": end - begin,
        "roles": lines,
        "held": _sliced("held up by", held, begin, end),
        "holders": HOLDERS,
        "roofline": None if line is None else str(line),
    }


def _line(name: str, tracks: Sequence[Track], begin: float, end: float) -> dict[str, Any]:
    stretches = (
        (phase.begin, phase.end, phase.name, 1.0 / len(tracks))
        for track in tracks
        for phase in track.phases(begin, end)
    )
    return _sliced(name, stretches, begin, end)


def _sliced(name: str, stretches: Iterable[Stretch], begin: float, end: float) -> dict[str, Any]:
    """Seconds of each name in all, and its shares of the slices."""
    width = (end - begin) / SLICES
    seconds: dict[str, float] = {}
    shares: dict[str, list[float]] = {}
    for since, until, phase, share in stretches:
        seconds[phase] = seconds.get(phase, 0.0) + share * (until - since)
        row = shares.setdefault(phase, [0.0] * SLICES)
        for index, part in slices((since - begin) / width, (until - begin) / width):
            row[min(index, SLICES - 1)] += share * part
    return {
        "name": name,
        "seconds": {phase: round(total, 3) for phase, total in _longest_first(seconds) if total},
        "slices": {phase: [round(value, 3) for value in row] for phase, row in shares.items() if seconds[phase]},
    }


def _longest_first(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])

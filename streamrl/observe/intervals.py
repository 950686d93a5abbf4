"""Algebra of time intervals: what the timeline of a run is computed with. Pure.

An interval is (begin, end) in seconds. A *set* of them is a list in order whose members neither touch nor overlap;
`union` makes one of any intervals, and the other functions take and give sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The instants that any of them holds; an empty or reversed interval holds none.

    >>> union([(3, 4), (1, 2), (2, 3), (7, 7)])
    [(1, 4)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def subtract(whole: list[Interval], removed: list[Interval]) -> list[Interval]:
    """The instants of `whole` that `removed` does not hold.

    >>> subtract([(0, 10)], [(2, 3), (9, 12)])
    [(0, 2), (3, 9)]
    """
    left: list[Interval] = []
    first = 0  # the removed intervals before this one end before `begin`
    for begin, end in whole:
        while first < len(removed) and removed[first][1] <= begin:
            first += 1
        place = begin
        for cut_begin, cut_end in _until(removed, first, end):
            if cut_begin > place:
                left.append((place, cut_begin))
            place = max(place, cut_end)
        if place < end:
            left.append((place, end))
    return left


def clip(intervals: Iterable[Interval], begin: float, end: float) -> list[Interval]:
    """What lies between two instants.

    >>> clip([(0, 2), (3, 9)], 1, 5)
    [(1, 2), (3, 5)]
    """
    return [(max(begin, a), min(end, b)) for a, b in intervals if a < end and b > begin]


def total(intervals: Iterable[Interval]) -> float:
    """Seconds of a set."""
    return sum(end - begin for begin, end in intervals)


def _until(intervals: list[Interval], first: int, end: float) -> Iterator[Interval]:
    """Those from `first` on that begin before `end`."""
    for index in range(first, len(intervals)):
        if intervals[index][0] >= end:
            return
        yield intervals[index]

"""Which sequences go into which packed row: bins of about as many tokens. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

# Items of a bin that may be swapped: the shortest ones, whose differences are the finest.
SWAPPED = 8

# Bins are evened out until the fullest is this much over their mean, or for so many rounds.
SWAP_ROUNDS = 24
EVEN = 0.0075


def plan(lengths: Sequence[int], ranks: int, budget: int, multiple: int = 1) -> list[list[list[int]]]:
    """Which indices of `lengths` go into which micro batch of which rank: [ranks][K][...].

    Longest first into the emptiest of ranks x K bins; K is the smallest multiple of `multiple` with which no bin
    goes over `budget` tokens, and is the same on every rank. Bins that ranks run at the same time are
    neighbours in length, and which rank has the longer one turns about. A bin may stay empty.
    Source: LPT scheduling (Graham 1969). Raises ValueError for a length over the budget.

    >>> plan([5, 3, 2], ranks=1, budget=6)
    [[[0], [1, 2]]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    if order and lengths[order[0]] > budget:
        raise ValueError(f"length {lengths[order[0]]} at index {order[0]} is over the budget of {budget} tokens")
    micro_batches = multiple * max(1, -(-sum(lengths) // (ranks * budget * multiple)))
    while (bins := _fill(order, lengths, ranks * micro_batches, budget)) is None:
        micro_batches += multiple
    bins = _evened(bins, lengths)
    rounds = [bins[start : start + ranks] for start in range(0, len(bins), ranks)]
    turned = [row if index % 2 == 0 else row[::-1] for index, row in enumerate(rounds)]
    return [[row[rank] for row in turned] for rank in range(ranks)]


def _fill(order: Sequence[int], lengths: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """`count` bins, each longest first, or None when the emptiest has no room for the next."""
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, index) for index in range(count)]
    for item in order:
        load, index = emptiest[0]
        if load + lengths[item] > budget:
            return None
        bins[index].append(item)
        heapq.heapreplace(emptiest, (load + lengths[item], index))
    return bins


def _evened(bins: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """The bins, fullest first, after some rounds in which each full bin swaps one item with an empty one.

    The fullest meets the emptiest first, and others in later rounds. Of their shortest items (or none) those are
    swapped that leave the smallest gap, so that no bin grows beyond the fuller one of its pair.
    """
    size = np.append(np.asarray(lengths, np.int64), 0)  # of item -1, which is none, 0
    table = np.array([([-1] * SWAPPED + items)[-SWAPPED:] for items in bins])
    rest = np.array([sum(lengths[item] for item in items[:-SWAPPED]) for items in bins], np.int64)
    half = len(bins) // 2
    for turn in range(SWAP_ROUNDS):
        loads = rest + size[table].sum(1)
        if loads.max() <= (1 + EVEN) * loads.mean():
            break
        order = np.argsort(-loads, kind="stable")
        full, empty = order[:half], np.roll(order[::-1][:half], turn)
        gap = loads[full] - loads[empty]
        moved = size[table[full]][:, :, None] - size[table[empty]][:, None, :]
        left = np.abs(gap[:, None, None] - 2 * moved).reshape(half, -1)
        best = left.argmin(1)
        better = left[np.arange(half), best] < gap
        ours, theirs = (full, best // SWAPPED), (empty, best % SWAPPED)
        taken, given = table[ours], table[theirs]
        table[ours], table[theirs] = np.where(better, given, taken), np.where(better, taken, given)
    loads = rest + size[table].sum(1)
    evened = [
        items[:-SWAPPED] + [item for item in row if item >= 0] for items, row in zip(bins, table.tolist(), strict=True)
    ]
    return [evened[index] for index in np.argsort(-loads, kind="stable")]

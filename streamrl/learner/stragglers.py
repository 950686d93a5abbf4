"""Which learner rank keeps the others waiting: each rank's own time for its passes against the median."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from streamrl.learner.parallel import Ranks

log = logging.getLogger(__name__)

# Times the median above which a rank is a straggler. Packing evens the load to a few percent, so that half as much
# again is the machine's doing.
SLOW = 1.5

# Steps in a row for which one rank must be it before the log says so: one step may meet a page fault.
PATIENCE = 3


class SlowestRank:
    """Finds the rank that stays slow, from the times of each step."""

    def __init__(self) -> None:
        self._slowest: int | None = None
        self._steps = 0

    def observe(self, seconds: Sequence[float]) -> tuple[float, int | None]:
        """(largest over median of one step's times, the rank to name in the log or None)."""
        median = statistics.median(seconds)
        largest = max(seconds)
        ratio = largest / median if median > 0 else 1.0
        rank = seconds.index(largest)
        self._steps = 0 if ratio <= SLOW else self._steps + 1 if rank == self._slowest else 1
        self._slowest = rank
        return ratio, rank if self._steps and self._steps % PATIENCE == 0 else None


class Stragglers:
    """The straggler report of a learner step, over all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._slowest = SlowestRank()
        self.seconds: list[float] = []  # of each rank in the last step

    def report(self, seconds: float) -> dict[str, float]:
        """The `straggler/` metrics of a step; `seconds` then has every rank's. All ranks call.

        seconds: this rank's forward and backward passes, without its waiting for the gradient reduction. Ranks
        that share a model copy wait for each other inside the passes, so that a slow one shows as a slow copy.
        """
        times = [torch.zeros(1, dtype=torch.float64) for _ in range(self._ranks.world)]
        dist.all_gather(times, torch.tensor([seconds], dtype=torch.float64), group=self._ranks.control)
        everyone = [float(time) for time in times]
        ratio, slowest = self._slowest.observe(everyone)
        if slowest is not None and self._ranks.rank == 0:
            log.warning(
                "rank %d is slow: its passes take %.2f s, %.1f times the median, for %d steps and more",
                slowest,
                everyone[slowest],
                ratio,
                PATIENCE,
            )
        self.seconds = everyone
        return {"straggler/max_over_median": ratio, "straggler/rank": everyone.index(max(everyone))}

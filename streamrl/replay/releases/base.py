"""What a release policy is: how long before a learner step needs its groups their tickets go out.

The bound says when a ticket may be issued at the earliest (`replay/orders/base.py`); later is always legal. A policy
answers with a lead time in seconds, and `replay/release_gate.py` makes tickets of it: that never holds back what the
learner waits for, so that no policy can stop a run.

It runs in the replay service, between two messages: it must be quick, and import no torch. What it has measured is in
the process alone, and is lost with the service.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from streamrl.choices import Choice, Options

EARLIEST = math.inf  # a lead time: as early as the bound allows


class Release(Choice, ABC):
    """Measures how long groups take, and answers with a lead time. It has no clock: times come in as arguments."""

    holds: ClassVar[bool] = True  # whether it may hold tickets back; nothing is measured for one that never does

    # Learner steps whose groups must be complete before it knows a lead time: those of a simulation do not count.
    slow_start: int = 0

    def __init__(self, groups_per_step: int, options: Options) -> None:
        """`groups_per_step`: P. `options`: those of `replay.release_options`, of the class's own Options."""
        self.groups_per_step = groups_per_step
        self.options = options

    def completed(self, seconds: float) -> None:
        """A group is complete, so long after its first ticket; lost tickets and dropped answers are in that time."""

    @abstractmethod
    def lead(self, open_for: Iterable[float], rounds: float) -> float | None:
        """Seconds before a step needs its groups at which their tickets go out; EARLIEST: as early as is legal.

        None while too little is measured: as many go out as the workers generate at once, and two steps' more.

        `open_for`: for how long the groups have been out that are not complete, in seconds, the longest first.
        `rounds`: the groups of a step over those that the workers generate at once, at least 1.
        """

    def metrics(self) -> dict[str, float]:
        """Metrics `release/...` of what was decided last."""
        return {}

"""Rank 0 while the disk of the run folder is full: it waits, and the other ranks with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from streamrl.config import Config
from streamrl.progress import ProgressWatch, RunFailedError


def _nobody(word: str) -> None:
    """No rank waits for a word."""


@dataclass(frozen=True, slots=True)
class RoomWait:
    """A `RoomCheck`: says "wait" to the ranks, so that no collective of theirs runs into its timeout.

    Usage:
        metrics.write(row, RoomWait(config, trainer.broadcast))
    """

    config: Config
    say: Callable[[str], object] = _nobody

    def __call__(self, waited: float) -> None:
        """Raises RunFailedError after `run.progress_timeout` seconds."""
        if waited > self.config.progress_timeout:
            raise RunFailedError(ProgressWatch(self.config, 0.0).line("the disk of the run folder is full"))
        self.say("wait")

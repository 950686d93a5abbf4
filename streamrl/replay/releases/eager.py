"""Every ticket as early as it is legal."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.replay.releases.base import EARLIEST, Release


class Eager(Release):
    """As early as the bound allows: generation never waits, and data is as old as the bound where training is slow."""

    holds = False

    def lead(self, open_for: Iterable[float], rounds: float) -> float:
        return EARLIEST

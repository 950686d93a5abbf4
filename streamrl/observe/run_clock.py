"""The present of a run on the clock of the hosts that write it.

    record ──heard──▶ RunClock ──now──▶ time of the newest record + what has passed here since it was read

A run on other hosts has another clock than this one: it is never compared with ours, of which durations alone are used.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from pathlib import Path

from streamrl.observe.events import now


class RunClock:
    """Usage:
    clock = RunClock.of(run_folder)
    clock.heard(record["time"])
    clock.now()  # seconds since the epoch, as the run's hosts count them
    """

    def __init__(self, *, is_ours: bool, clock: Callable[[], float] = now) -> None:
        """`is_ours`: the run is written on this host, so that its present is known before any record is read."""
        self._clock = clock
        self._ahead = 0.0 if is_ours else -math.inf  # seconds that the run's clock is ahead of ours, at least

    @classmethod
    def of(cls, run_folder: Path) -> RunClock:
        """By the host that `environment.json` names; without a name it is ours."""
        environment = run_folder / "environment.json"
        host = json.loads(environment.read_text()).get("host") if environment.is_file() else None
        return cls(is_ours=host in (None, socket.gethostname()))

    def heard(self, time: float) -> None:
        """Something was recorded at `time`, and is read now."""
        self._ahead = max(self._ahead, time - self._clock())

    def now(self) -> float:
        """Seconds since the epoch; of another host's run by our clock, until a record of it is read."""
        return self._clock() + (self._ahead if math.isfinite(self._ahead) else 0.0)

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
    clock.heard(record["time"], record["role"])
    clock.now()  # seconds since the epoch, as the run's hosts count them
    """

    def __init__(self, *, is_ours: bool, clock: Callable[[], float] = now) -> None:
        """`is_ours`: the run is written on this host, so that its present is known before any record is read."""
        self._clock = clock
        self._least = 0.0 if is_ours else -math.inf
        self._ahead: dict[str, float] = {}  # of each role: seconds that its clock is ahead of ours, at least

    @classmethod
    def of(cls, run_folder: Path) -> RunClock:
        """By the host that `environment.json` names; without a name it is ours."""
        environment = run_folder / "environment.json"
        host = json.loads(environment.read_text()).get("host") if environment.is_file() else None
        return cls(is_ours=host in (None, socket.gethostname()))

    def heard(self, time: float, role: str = "", *, begins: bool = False) -> None:
        """A role recorded something at `time`, which is read now; `begins`: it is the first record of a new process.

        That has the machine's clock of its start, which may have been set back since the process before.
        """
        former = -math.inf if begins else self._ahead.get(role, -math.inf)
        self._ahead[role] = max(former, time - self._clock())

    def now(self) -> float:
        """Seconds since the epoch; of another host's run by our clock, until a record of it is read."""
        ahead = max((self._least, *self._ahead.values()))
        return self._clock() + (ahead if math.isfinite(ahead) else 0.0)

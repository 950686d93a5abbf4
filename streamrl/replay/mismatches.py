"""What servers tell of `publish.mismatch`: for the learner's next row, that of the server furthest from the learner.

Pure, like the buffer.
"""

from __future__ import annotations

from streamrl.observe.mismatch import excess
from streamrl.stream.messages import Mismatch


class Mismatches:
    """The mismatches of a run.

    Usage:
        mismatches.record(Mismatch(version=v20, server="server-0", metrics={"mismatch/mean": 1e-3, ...}))
        mismatches.metrics(step=21)  # {'mismatch/mean': 1e-3, ..., 'mismatch/servers': 1.0}
    """

    def __init__(self) -> None:
        self._worst: dict[str, float] = {}  # of those that no batch has taken along
        self._servers = 0  # how many those are
        self._given: tuple[int, dict[str, float]] = (-1, {})  # the learner step whose batch took the last ones along

    def record(self, message: Mismatch) -> None:
        """A server has scored the answers of a version."""
        self._servers += 1
        if not self._worst or excess(message.metrics) >= excess(self._worst):
            self._worst = message.metrics

    def metrics(self, step: int) -> dict[str, float]:
        """For the batch of `step`. One that is delivered again brings the same again."""
        if self._given[0] != step:
            told = {**self._worst, "mismatch/servers": float(self._servers)} if self._servers else {}
            self._given = step, told
            self._worst, self._servers = {}, 0
        return self._given[1]

"""What evaluations tell and what they cost: figures for the learner's next row, and how long a publish waited for them.

Pure, like the buffer: messages and times come in as arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from streamrl.stream.messages import Evaluated, ServerState
from streamrl.types import PolicyVersion

WAIT = "eval/publish_wait"


class Evaluations:
    """The evaluations of a run.

    A publish waits while a newer version exists than any server has, and all of them are pinned: with a single
    server that is as long as its evaluation still takes.

    Usage:
        evaluations.record(Evaluated(version=v20, metrics={"eval/copy/pass@1": 0.5}))
        evaluations.metrics(step=21, now=3.0)  # {'eval/copy/pass@1': 0.5}
    """

    def __init__(self) -> None:
        self._news: deque[Evaluated] = deque()  # that no batch has taken along
        self._given: dict[int, dict[str, float]] = {}  # by the learner step whose batch took them along
        self._newest: PolicyVersion | None = None  # that was announced
        self._since: float | None = None  # when the present wait began
        self._counted = 0.0  # until when the present wait is in a batch's figures
        self._waited = 0.0  # seconds that are in none

    def announce(self, version: PolicyVersion) -> None:
        """The learner has published `version`."""
        self._newest = version

    def record(self, message: Evaluated) -> None:
        """An evaluation is complete."""
        self._news.append(message)

    def tick(self, servers: Sequence[ServerState], now: float) -> float | None:
        """Take note of the live servers. The seconds of a wait for an evaluation that is over now, else None."""
        newest = self._newest
        waits = bool(servers) and newest is not None and all(s.pinned and s.version < newest for s in servers)
        if waits and self._since is None:
            self._since = self._counted = now
        if waits or self._since is None:
            return None
        self._count(now)
        seconds, self._since = now - self._since, None
        return seconds

    def metrics(self, step: int, now: float) -> dict[str, float]:
        """For the batch of `step`: what has come since the last one, of two evaluations the first.

        A step that is delivered again brings the same again.
        """
        if step not in self._given and self._news:
            self._given[step] = self._news.popleft().metrics
        if waited := self._pop_waited(now):
            self._given[step] = self._given.get(step, {}) | {WAIT: waited}
        return self._given.get(step, {})

    def rest(self) -> list[Evaluated]:
        """The evaluations that have come since the last batch of the run. Nobody waits for a publish any more."""
        news, self._news = [*self._news], deque()
        return news

    def _count(self, now: float) -> None:
        """Count a wait that goes on, up to now."""
        if self._since is not None:
            self._waited += now - self._counted
            self._counted = now

    def _pop_waited(self, now: float) -> float:
        self._count(now)
        waited, self._waited = self._waited, 0.0
        return waited

"""What evaluations tell and what they cost: figures for the learner's next row, and how long a publish waited for them.

What was told with which batch is in the service's events, for the service that comes after a crash:

    evaluated (number, version, metrics) ─▶ batch (step, evaluation: its number) or evaluated.late (numbers)

Pure, like the buffer: messages, times and records come in as arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.stream.messages import Evaluated, ServerState
from streamrl.types import PolicyVersion

WAIT = "eval/publish_wait"


@dataclass(frozen=True, slots=True)
class _Evaluation:
    number: int  # in the run
    told: Evaluated


class Evaluations:
    """The evaluations of a run.

    A publish waits while a newer version exists than any server has, and all of them are pinned: with a single
    server that is as long as its evaluation still takes.

    Usage:
        evaluations.record(Evaluated(version=v20, metrics={"eval/copy/pass@1": 0.5}))
        evaluations.metrics(step=21, now=3.0)  # {'eval/copy/pass@1': 0.5}
        evaluations.fields(step=21)  # {'evaluation': 0}, for the event of the batch
    """

    def __init__(self) -> None:
        self._numbers = 0  # evaluations so far
        self._news: deque[_Evaluation] = deque()  # that no batch has taken along
        self._given: dict[int, _Evaluation] = {}  # by the learner step whose batch took them along
        self._waits: dict[int, float] = {}  # seconds, by the same
        self._newest: PolicyVersion | None = None  # that was announced, to this process
        self._since: float | None = None  # when the present wait began
        self._counted = 0.0  # until when the present wait is in a batch's figures
        self._waited = 0.0  # seconds that are in none

    def recover(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Become what the events of former services say, in order, before anything else is told.

        An evaluation without a number is of a service that did not say which batch took it along: it is not told again.
        """
        for event in events:
            match event:
                case {"event": "evaluated", "number": number, "version": version, "metrics": metrics}:
                    self._add(_Evaluation(number, Evaluated(version=PolicyVersion.parse(version), metrics=metrics)))
                case {"event": "batch", "step": step}:
                    self._give(step, event.get("evaluation"))
                    self._waits[step] = event.get("publish_wait", 0.0)
                case {"event": "evaluated.late", "numbers": numbers}:
                    self._news = deque(each for each in self._news if each.number not in numbers)

    def announce(self, version: PolicyVersion) -> None:
        """The learner has published `version`."""
        self._newest = version

    def record(self, message: Evaluated) -> int:
        """An evaluation is complete. Returns its number in the run, for the event."""
        evaluation = _Evaluation(self._numbers, message)
        self._add(evaluation)
        return evaluation.number

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

    def metrics(self, step: int, now: float, *, again: bool = False) -> dict[str, float]:
        """For the batch of `step`: what has come since the last one, of two evaluations the first.

        A step that is delivered `again` brings the same again, and what it did not bring waits for a new one.
        """
        if not again:
            self._give(step, self._news[0].number if self._news else None)
            self._waits[step] = self._waits.get(step, 0.0) + self._pop_waited(now)
        given, waited = self._given.get(step), self._waits.get(step)
        return (given.told.metrics if given else {}) | ({WAIT: waited} if waited else {})

    def fields(self, step: int) -> dict[str, Any]:
        """What `recover` needs to know of this batch: fields of its event."""
        given, waited = self._given.get(step), self._waits.get(step)
        return ({"evaluation": given.number} if given else {}) | ({"publish_wait": waited} if waited else {})

    def rest(self) -> dict[int, Evaluated]:
        """The evaluations that have come since the last batch of the run, by number. Nobody waits for a publish now."""
        news, self._news = {each.number: each.told for each in self._news}, deque()
        return news

    def _add(self, evaluation: _Evaluation) -> None:
        self._numbers = max(self._numbers, evaluation.number + 1)
        self._news.append(evaluation)

    def _give(self, step: int, number: int | None) -> None:
        """The batch of `step` takes the evaluation of this number along, unless it has one."""
        if number is not None:  # of one whose event was lost
            self._numbers = max(self._numbers, number + 1)
        found = next((each for each in self._news if each.number == number), None)
        if found is not None and step not in self._given:
            self._news.remove(found)
            self._given[step] = found

    def _count(self, now: float) -> None:
        """Count a wait that goes on, up to now."""
        if self._since is not None:
            self._waited += now - self._counted
            self._counted = now

    def _pop_waited(self, now: float) -> float:
        self._count(now)
        waited, self._waited = self._waited, 0.0
        return waited

"""How many groups, or requests, a worker has at once, by how full the KV cache of its servers is: between two bounds.

A look at the servers says `full`, `used` (all of the number is in use and there is room) or `fair`, and what follows is
the table MOVES:

    doubling   used: twice as many        full: a fifth less, then resting         (a start from the lower bound)
    resting    PATIENCE looks as it is, so that the shrinkage shows first, then feeling
    feeling    used: one group more       full: a fifth less, then resting

Pure: from what the servers report it computes the number. Additive increase and multiplicative decrease is
what keeps several workers that share a server fair to each other (Chiu and Jain, 1989).
"""

from __future__ import annotations

import math
from enum import StrEnum

from streamrl.config import Config
from streamrl.config.in_flight import most_requests

# Usage of the KV cache from which the number shrinks: SGLang retracts requests, and computes them again, at 1.
FULL = 0.9

# Usage of the KV cache up to which the number grows: running requests grow into the rest.
ROOM = 0.75

# Requests retracted at the edge cost their prefill again; a fifth of them gives the others their tokens.
SHRINK = 0.8

# Ticks after a shrinkage without another one: the groups that are too many end first.
PATIENCE = 3

# Seconds behind an update in which requests come back into the cache.
SETTLING = 3.0


class Phase(StrEnum):
    """How the limit is approached."""

    DOUBLING = "doubling"
    RESTING = "resting"
    FEELING = "feeling"


class Look(StrEnum):
    """What the servers and the number in use say."""

    FULL = "full"
    USED = "used"
    FAIR = "fair"


class Move(StrEnum):
    """What becomes of the number."""

    DOUBLE = "double"
    ADD = "add"
    SHRINK = "shrink"
    KEEP = "keep"


MOVES: dict[tuple[Phase, Look], tuple[Move, Phase]] = {
    (Phase.DOUBLING, Look.FULL): (Move.SHRINK, Phase.RESTING),
    (Phase.DOUBLING, Look.USED): (Move.DOUBLE, Phase.DOUBLING),
    (Phase.DOUBLING, Look.FAIR): (Move.KEEP, Phase.DOUBLING),
    (Phase.RESTING, Look.FULL): (Move.KEEP, Phase.RESTING),
    (Phase.RESTING, Look.USED): (Move.KEEP, Phase.RESTING),
    (Phase.RESTING, Look.FAIR): (Move.KEEP, Phase.RESTING),
    (Phase.FEELING, Look.FULL): (Move.SHRINK, Phase.RESTING),
    (Phase.FEELING, Look.USED): (Move.ADD, Phase.FEELING),
    (Phase.FEELING, Look.FAIR): (Move.KEEP, Phase.FEELING),
}


class Concurrency:
    """A number of groups between `least` and `most`; of requests where `group`, the requests of one, is given.

    >>> concurrency = Concurrency(least=4, most=64)
    >>> concurrency.record(usage=0.2, waiting=0, busy=4), concurrency.record(usage=0.95, waiting=3, busy=8)
    (8, 6)
    """

    def __init__(self, least: int, most: int, group: int = 1) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"bounds {least} and {most}; allowed: 1 <= least <= most")
        self.capacity = least
        self._least = least
        self._most = most
        self._group = group
        self._phase = Phase.DOUBLING
        self._rest = 0  # looks

    def record(self, usage: float, waiting: int, busy: int) -> int:
        """The new number. `usage` of the fullest KV cache, requests `waiting` for a place in it, `busy` of it now."""
        if usage >= FULL or waiting > 0:
            look = Look.FULL
        else:
            look = Look.USED if usage <= ROOM and busy >= self.capacity else Look.FAIR
        move, phase = MOVES[self._phase, look]
        if self._phase is Phase.RESTING:
            self._rest -= 1
            phase = phase if self._rest else Phase.FEELING
        elif phase is Phase.RESTING:
            self._rest = PATIENCE
        self._phase = phase
        self.capacity = min(self._most, max(self._least, self._moved(move)))
        return self.capacity

    def _moved(self, move: Move) -> int:
        match move:
            case Move.DOUBLE:
                return 2 * self.capacity
            case Move.ADD:
                return self.capacity + self._group
            case Move.SHRINK:
                return int(SHRINK * self.capacity)
            case Move.KEEP:
                return self.capacity


class Updates:
    """Weights that the worker's servers take in. An update puts what they generate back into their queue: requests that
    wait then say nothing of the cache.

    >>> updates = Updates()
    >>> updates.begin(), updates.unsettled(now=10.0), updates.end(now=11.0)
    (None, True, None)
    >>> updates.unsettled(now=12.0), updates.unsettled(now=20.0)
    (True, False)
    """

    def __init__(self) -> None:
        self._open = 0
        self._ended = -math.inf

    def begin(self) -> None:
        self._open += 1

    def end(self, now: float) -> None:
        self._open -= 1
        self._ended = now

    def unsettled(self, now: float) -> bool:
        """One is under way, or has ended a moment ago."""
        return self._open > 0 or now - self._ended < SETTLING


def adapting(config: Config) -> Concurrency | None:
    """The concurrency that a worker adapts, `config` as it sees it; None where its number is set."""
    generate = config.generate
    if generate.requests_in_flight == "auto":
        group = generate.group_size
        return Concurrency(group, max(group, most_requests(config, generate)), group)
    if generate.least_in_flight:
        return Concurrency(generate.least_in_flight, generate.groups_in_flight)
    return None

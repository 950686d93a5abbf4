"""How many groups a worker generates at once, by how full the KV cache of its servers is: between two bounds.

    no pressure yet:      doubled at every look at which all of it is in use         (a start from the lower bound)
    room in the cache:    one group more at every look at which all of it is in use
    pressure:             a fifth less, then PATIENCE looks as it is, so that the shrinkage shows first

Pure: from what the servers report it computes the number. Additive increase and multiplicative decrease is
what keeps several workers that share a server fair to each other (Chiu and Jain, 1989).
"""

from __future__ import annotations

# Usage of the KV cache from which the number shrinks: SGLang retracts requests, and computes them again, at 1.
FULL = 0.9

# Usage of the KV cache up to which the number grows: running requests grow into the rest.
ROOM = 0.75

# Requests retracted at the edge cost their prefill again; a fifth of them gives the others their tokens.
SHRINK = 0.8

# Ticks after a shrinkage without another one: the groups that are too many end first.
PATIENCE = 3


class Concurrency:
    """A number of groups between `least` and `most`.

    >>> concurrency = Concurrency(least=4, most=64)
    >>> concurrency.record(usage=0.2, waiting=0, busy=4), concurrency.record(usage=0.95, waiting=3, busy=8)
    (8, 6)
    """

    def __init__(self, least: int, most: int) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"bounds {least} and {most}; allowed: 1 <= least <= most")
        self.capacity = least
        self._least = least
        self._most = most
        self._pressed = False  # the limit was met once: from then on it is approached one by one
        self._patience = 0

    def record(self, usage: float, waiting: int, busy: int) -> int:
        """The new number. `usage` of the fullest KV cache, requests `waiting` for a place in it, `busy` groups now."""
        if usage >= FULL or waiting > 0:
            self._shrink()
        elif self._patience:
            self._patience -= 1
        elif usage <= ROOM and busy >= self.capacity:
            self.capacity = min(self._most, self.capacity + 1 if self._pressed else 2 * self.capacity)
        return self.capacity

    def _shrink(self) -> None:
        self._pressed = True
        if self._patience:
            self._patience -= 1
            return
        self.capacity = max(self._least, int(SHRINK * self.capacity))
        self._patience = PATIENCE

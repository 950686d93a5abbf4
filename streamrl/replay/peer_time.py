"""The time by which peers are late: it stops while the service itself could not receive.

    looks as usual ──▶ it goes on with the clock
    a look that took longer than `pause` ──▶ it stops until the queue was empty once ──▶ it goes on

A service that was stopped, or sat in a long fsync, finds everything that its peers have said meanwhile in its queue.
Judged by the clock, their leases would be over before their heartbeats are received. Pure, like the buffer.
"""

from __future__ import annotations

# Seconds between two polls that are no fault of the peers: five times the longest wait for a message.
PAUSE = 1.0

# Seconds of a pause where leases are shorter than they should be: twice the longest wait for a message.
SHORTEST = 0.4

# Polls that catching up may take: what arrives faster than it is handled for so long is a flood, and no backlog.
LOOKS = 200


class PeerTime:
    """Seconds, that begin with the clock's and never pass it.

    >>> time = PeerTime(100.0, lease=30.0)
    >>> time.tick(100.2, emptied=True), time.tick(160.0, emptied=False), time.tick(160.1, emptied=True)
    (100.2, 100.2, 100.3)
    """

    def __init__(self, now: float, lease: float) -> None:
        """`lease`: seconds without a word that a peer has; a part of it is a pause where that is short."""
        self.now = now
        self._pause = max(SHORTEST, min(PAUSE, lease / 3))
        self._looked = now
        self._looks = 0  # that may still be needed for what came during a pause

    @property
    def catches_up(self) -> bool:
        """Does the service still receive what was said during a pause?"""
        return self._looks > 0

    def tick(self, now: float, *, emptied: bool) -> float:
        """The service has received what there was, `emptied`: all of it. Returns the time of the peers."""
        elapsed, self._looked = now - self._looked, now
        if elapsed > self._pause and not self.catches_up:
            self._looks = LOOKS
            return self.now
        self._looks = 0 if emptied else max(0, self._looks - 1)
        if not self.catches_up:
            self.now += min(elapsed, self._pause)
        return self.now

"""Who is behind which socket: the learner, the publisher, and those of whom nothing is known yet.

The workers have a roster of their own (`replay/workers.py`). Pure: time is an argument.
"""

from __future__ import annotations

from collections import OrderedDict

# Seconds between two Introduces to one peer: everything that was queued for a service that was started again arrives at
# once, and one answer will do.
ASK_AGAIN = 1.0

# Peers that were asked, or complained of, lately; beyond it the oldest is forgotten, and asked or refused again.
REMEMBERED = 1024


class Peers:
    """The identities of the learner's and the publisher's sockets, and what was said to strangers."""

    def __init__(self) -> None:
        self.learner: bytes | None = None
        self.publisher: bytes | None = None
        self._asked: OrderedDict[bytes, float] = OrderedDict()  # when each was last asked to introduce itself
        self._complained: OrderedDict[bytes, float] = OrderedDict()

    def knows(self, identity: bytes) -> bool:
        return identity in (self.learner, self.publisher)

    def to_ask(self, identity: bytes, now: float) -> bool:
        """Is it time to ask this peer who it is, or to begin again?"""
        return _passed(self._asked, identity, now, ASK_AGAIN)

    def owes_hello(self, identity: bytes) -> bool:
        """Was this peer asked, and has it not answered yet? The question may be lost, or the answer."""
        return identity in self._asked

    def introduced(self, identity: bytes) -> None:
        """It has said Hello."""
        self._asked.pop(identity, None)

    def to_complain(self, identity: bytes, now: float) -> bool:
        """Is this the first malformed message of the peer?"""
        return _passed(self._complained, identity, now, float("inf"))


def _passed(times: OrderedDict[bytes, float], identity: bytes, now: float, period: float) -> bool:
    """Note the peer, unless that was done less than `period` seconds ago. Returns whether it was noted."""
    if now - times.get(identity, float("-inf")) < period:
        return False
    times[identity] = now
    times.move_to_end(identity)
    if len(times) > REMEMBERED:
        times.popitem(last=False)
    return True

"""Capacity counted in requests: which request may start, and how many tickets a worker wants. Pure.

    ticket ──open──▶ begun by its first request ──close──▶ gone
    request ──ask──▶ waiting ──start──▶ running ──end──▶ gone      the oldest group's first, as long as there are places
                        └──────────end (its deadline)──▶ gone

A place is free as soon as its request is answered, whatever becomes of the rest of the group. Tickets are wanted until
one group waits ahead of the places. What a group still asks for counts, or G for one that has not begun:

    tickets = open groups + ceil((places + AHEAD G - asked for) / G), at most places + AHEAD    (config/in_flight.py)

So a request that is answered waits for no ticket, and no more groups are out than are needed to fill the places. The
replay service admits by `replay.max_staleness` as ever: fewer tickets may come than are wanted.
"""

from __future__ import annotations

import heapq

from streamrl.config.in_flight import wanted
from streamrl.stream.messages import TicketKey


class Submission:
    """The places of one worker, its requests and its open tickets.

    >>> submission = Submission(places=4, group_size=2)
    >>> submission.tickets
    3
    >>> submission.open((7, 0))
    >>> first, second = submission.ask((7, 0)), submission.ask((7, 0))
    >>> submission.start(), submission.tickets
    ([0, 1], 3)
    """

    def __init__(self, places: int, group_size: int) -> None:
        """Raises ValueError where nothing could run."""
        if min(places, group_size) < 1:
            raise ValueError(f"{places} places for groups of {group_size}; allowed: at least 1 of both")
        self._places = places
        self._group_size = group_size
        self._open: dict[TicketKey, bool] = {}  # has it begun?
        self._waiting: list[tuple[int, int]] = []  # (group id, request), a heap; may hold requests that have ended
        self._requests: dict[int, bool] = {}  # does it run?
        self._running = 0
        self._next = 0

    @property
    def places(self) -> int:
        """Requests that may run at once."""
        return self._places

    @property
    def running(self) -> int:
        """Requests that run: more than there are places after `resize`, until enough have ended."""
        return self._running

    @property
    def tickets(self) -> int:
        """Tickets to hold at the most now, those that are open included."""
        unbegun = sum(not begun for begun in self._open.values())
        asked = len(self._requests) + unbegun * self._group_size
        return wanted(self._places, self._group_size, len(self._open), asked)

    def open(self, key: TicketKey) -> None:
        """A ticket came."""
        self._open[key] = False

    def close(self, key: TicketKey) -> None:
        """Its group is done. Unknown ones are passed over."""
        self._open.pop(key, None)

    def ask(self, key: TicketKey) -> int:
        """A request of this group. Returns its number; it runs once `start` has named it."""
        if key in self._open:
            self._open[key] = True
        number, self._next = self._next, self._next + 1
        self._requests[number] = False
        heapq.heappush(self._waiting, (key[0], number))
        return number

    def start(self) -> list[int]:
        """The requests that run from now on."""
        started = []
        while self._waiting and self._running < self._places:
            _, number = heapq.heappop(self._waiting)
            if number in self._requests:
                self._requests[number] = True
                self._running += 1
                started.append(number)
        return started

    def end(self, number: int) -> None:
        """It is answered, or waits no longer. One that has ended is passed over."""
        self._running -= self._requests.pop(number, False)

    def resize(self, places: int) -> None:
        """Set the number of places; a request that runs is not ended."""
        self._places = places

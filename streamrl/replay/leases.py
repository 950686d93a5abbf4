"""Who holds which ticket, until when, and which groups wait for another one.

    grant ──▶ held ──heartbeat──▶ held longer         after a crash: nobody's, until a worker names it
      ▲        │
      │        └── deadline, Bye, failure ──▶ waiting (the oldest group first)
      └────────────────────────────────────────┤
                                               └──▶ exhausted: after `max_attempts` tickets, or `limit` seconds out

This is the memory of the process alone: nothing of it is recorded. Pure: the time is an argument.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from streamrl.replay.records import Phase, Slot
from streamrl.types import Ticket

NEVER = float("inf")


class Lease(msgspec.Struct):
    """A ticket that is out."""

    ticket: Ticket
    holder: str | None  # the worker that generates it; None after a crash
    since: float  # seconds, on the service's clock
    deadline: float


class Leases:
    """The groups that are not complete: their tickets are out, wait to be issued, or are exhausted."""

    def __init__(self, lease: float, limit: float, max_attempts: int) -> None:
        """Seconds that a ticket lasts without a heartbeat, and that a prompt may be out under all its holders."""
        self._seconds = lease
        self._limit = limit
        self._max_attempts = max_attempts
        self._leases: dict[int, Lease] = {}
        self._held: dict[str, int] = {}
        self._spent: dict[int, float] = {}  # seconds under former holders
        self._excused: Counter[int] = Counter()  # tickets that do not count against the prompt
        self._earliest = NEVER  # no lease ends before
        self._waiting: list[int] = []  # a heap
        self.exhausted: dict[int, None] = {}  # groups that get no further ticket

    @property
    def first_waiting(self) -> int | None:
        """The oldest group that waits for a ticket."""
        return self._waiting[0] if self._waiting else None

    def held(self, holder: str) -> int:
        """Tickets of this worker."""
        return self._held.get(holder, 0)

    def get(self, group_id: int) -> Lease | None:
        """The ticket that is out for a group."""
        return self._leases.get(group_id)

    def of(self, holder: str) -> list[Lease]:
        """The tickets of a worker."""
        return [lease for lease in self._leases.values() if lease.holder == holder]

    def grant(self, ticket: Ticket, holder: str, now: float) -> None:
        """A ticket goes to a worker: for the first group that waits, or for a new one."""
        if self._waiting and self._waiting[0] == ticket.group_id:
            heapq.heappop(self._waiting)
        lease = self._leases[ticket.group_id] = Lease(ticket, holder, now, ticket.deadline)
        self._held[holder] = self._held.get(holder, 0) + 1
        if (end := self._end_of(lease)) < self._earliest:
            self._earliest = end

    def extend(self, holder: str, keys: Iterable[tuple[int, int]], now: float) -> None:
        """A heartbeat of a worker that names its tickets, (group id, attempt)."""
        for group_id, attempt in keys:
            lease = self._leases.get(group_id)
            if lease is not None and lease.holder == holder and lease.ticket.attempt == attempt:
                lease.deadline = now + self._seconds

    def adopt(self, holder: str, keys: Iterable[tuple[int, int]], now: float) -> None:
        """A worker says Hello and names what it still has: its own, and what is nobody's, is its own from now on."""
        keys = tuple(keys)
        for group_id, attempt in keys:
            lease = self._leases.get(group_id)
            if lease is not None and lease.holder is None and lease.ticket.attempt == attempt:
                lease.holder, lease.since = holder, now
                self._held[holder] = self._held.get(holder, 0) + 1
        self.extend(holder, keys, now)
        self._earliest = min(self._earliest, now)  # whoever was nobody's has another end now: look anew

    def expired(self, now: float) -> list[Lease]:
        """The leases that are over, by their deadline or by the limit; the caller ends them."""
        if now < self._earliest:
            return []
        over = []
        self._earliest = NEVER
        for lease in self._leases.values():
            if lease.deadline == NEVER:
                lease.since, lease.deadline = now, now + self._seconds
            if self._end_of(lease) > now:
                self._earliest = min(self._earliest, self._end_of(lease))
                continue
            if self._limit_of(lease) <= now:
                self._spent[lease.ticket.group_id] = self._limit
            over.append(lease)
        return over

    def end(self, group_id: int) -> Lease | None:
        """The ticket is out no longer."""
        lease = self._leases.pop(group_id, None)
        if lease is None or lease.holder is None:
            return lease
        held = self._held.pop(lease.holder) - 1
        if held:
            self._held[lease.holder] = held
        return lease

    def give_back(self, slot: Slot, *, excused: bool = False) -> None:
        """The ticket came to nothing, `excused`: through no fault of its prompt. The time up to its last sign of life
        counts in any case.
        """
        self._excused[slot.group_id] += excused
        lease = self.end(slot.group_id)
        if lease is not None and lease.holder is not None:
            out = lease.deadline - self._seconds - lease.since
            self._spent[slot.group_id] = self._spent.get(slot.group_id, 0.0) + max(0.0, out)
        self.wait(slot)

    def wait(self, slot: Slot) -> None:
        """The group is to be issued again, unless it was often enough or long enough."""
        counted = slot.issues - self._excused[slot.group_id]
        if counted >= self._max_attempts or self._spent.get(slot.group_id, 0.0) >= self._limit:
            self.exhausted[slot.group_id] = None
        else:
            heapq.heappush(self._waiting, slot.group_id)

    def answered(self, group_id: int) -> None:
        """The group has an answer; what may be issued for it next has its whole time."""
        self.end(group_id)
        self._spent.pop(group_id, None)
        self._excused.pop(group_id, None)
        self.exhausted.pop(group_id, None)

    def recover(self, slots: Iterable[Slot], seed: int) -> None:
        """After a crash: these tickets are out, nobody knows where. Their leases begin at the next `expired`."""
        for slot in slots:
            self._leases[slot.group_id] = Lease(slot.ticket(seed, NEVER), None, NEVER, NEVER)
        self._earliest = -NEVER

    def follow(self, slots: Mapping[int, Slot]) -> None:
        """Many groups have changed at once: end what is out for none of them, and look anew at what waits."""
        for group_id, lease in list(self._leases.items()):
            slot = slots.get(group_id)
            if slot is None or slot.phase is not Phase.ISSUED or slot.attempt != lease.ticket.attempt:
                self.end(group_id)
        self._spent = {group_id: seconds for group_id, seconds in self._spent.items() if group_id in slots}
        self._excused = Counter({group_id: count for group_id, count in self._excused.items() if group_id in slots})
        self._waiting, self.exhausted = [], {}
        for group_id, slot in slots.items():
            if slot.phase is Phase.WAITING or (slot.phase is Phase.ISSUED and group_id not in self._leases):
                self.wait(slot)

    def _end_of(self, lease: Lease) -> float:
        limit = self._limit_of(lease)
        return limit if limit < lease.deadline else lease.deadline

    def _limit_of(self, lease: Lease) -> float:
        return lease.since + self._limit - self._spent.get(lease.ticket.group_id, 0.0)

"""How long a ticket lasts: who has it until when, and when a group gets no further one.

    grant ──▶ held ──heartbeat──▶ held longer         after a crash: nobody's, until a worker names it (adopt)
      ▲        │
      │        └── deadline, Bye, failure ──▶ lost: WAITING (the oldest group first)
      └────────────────────────────────────────┤
                                               └──▶ EXHAUSTED: after `max_attempts` tickets, or `limit` seconds out

What is known of a ticket is in the record of its group. Pure: the time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.replay.life import ADOPT, EXHAUST, LOSE
from streamrl.replay.lives import NEVER, Life, Lives


class Leases:
    """The rules of time for the tickets that are out."""

    def __init__(self, lives: Lives, lease: float, limit: float, max_attempts: int) -> None:
        """Seconds that a ticket lasts without a heartbeat, and that a prompt may be out under all its holders."""
        self._lives = lives
        self._seconds = lease
        self._limit = limit
        self._max_attempts = max_attempts
        self._earliest = NEVER  # no lease ends before

    def grant(self, life: Life, holder: str, now: float) -> None:
        """A ticket that was just issued goes to a worker."""
        assert life.out is not None
        life.since, life.deadline = now, life.out.deadline
        self._lives.hold(life, holder)
        if (end := self._end_of(life)) < self._earliest:
            self._earliest = end

    def extend(self, holder: str, keys: Iterable[tuple[int, int]], now: float) -> None:
        """A heartbeat of a worker that names its tickets, (group id, attempt)."""
        for group_id, attempt in keys:
            life = self._lives.out.get(group_id)
            if life is not None and life.holder == holder and life.attempt == attempt:
                life.deadline = now + self._seconds

    def adopt(self, holder: str, keys: Iterable[tuple[int, int]], now: float) -> None:
        """A worker says Hello and names what it still has: its own, and what is nobody's, is its own from now on."""
        keys = tuple(keys)
        for group_id, attempt in keys:
            life = self._lives.out.get(group_id)
            if life is not None and life.holder is None and life.attempt == attempt:
                self._lives.move(life, ADOPT)
                self._lives.hold(life, holder)
                life.since = now
                self._lives.emit(ADOPT, worker=holder, group_id=group_id, attempt=attempt)
        self.extend(holder, keys, now)
        self._earliest = min(self._earliest, now)  # what was nobody's has another end now

    def expired(self, now: float) -> list[Life]:
        """The groups whose lease is over, by its deadline or by the limit; the caller ends them."""
        if now < self._earliest:
            return []
        over = []
        self._earliest = NEVER
        for life in self._lives.out.values():
            if life.deadline == NEVER:
                life.since, life.deadline = now, now + self._seconds
            if (end := self._end_of(life)) > now:
                self._earliest = min(self._earliest, end)
                continue
            if life.since + self._limit - life.spent <= now:
                life.spent = self._limit
            over.append(life)
        return over

    def end(self, life: Life, *, excused: bool) -> None:
        """The ticket came to nothing, `excused`: through no fault of its prompt. The time up to its last sign of life
        counts in any case.
        """
        life.is_excused = excused
        if life.holder is not None:
            life.spent += max(0.0, life.deadline - self._seconds - life.since)
        self._lives.move(life, LOSE)

    def exhaust(self, life: Life) -> None:
        """A group that waits gets no further ticket if it had them often enough, or long enough."""
        if life.issues - life.all_excused >= self._max_attempts or life.spent >= self._limit:
            self._lives.move(life, EXHAUST)
            self._lives.emit(EXHAUST, group_id=life.group_id, attempt=life.attempt, issues=life.issues)

    def recover(self) -> None:
        """After a crash: the tickets that are out are nobody's. Their leases begin at the next `expired`."""
        self._earliest = -NEVER

    def _end_of(self, life: Life) -> float:
        limit, deadline = life.since + self._limit - life.spent, life.deadline
        return limit if limit < deadline else deadline

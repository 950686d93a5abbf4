"""The groups that matter still: one record for each, and the indexes by which they are found.

A record has all that is known of its group. Its durable half is what the journal's records add up to
(`replay/state.py`), the rest is the process's own. `Lives.move` is the only way from one phase to another.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from streamrl.replay.life import (
    COMPLETED,
    CONSUMED,
    EXHAUSTED,
    FORGOTTEN,
    ISSUED,
    LIFE,
    LOSE,
    QUARANTINE,
    QUARANTINED,
    WAITING,
    Event,
    Phase,
)
from streamrl.replay.records import Slot, Stored
from streamrl.types import Ticket

NEVER = float("inf")

_after = LIFE.after  # a call less for what happens to every group


class Life(Slot, kw_only=True, gc=False):
    """One group from its first ticket until its step can never be delivered again; `phase` is the present one.

    Nothing that it holds leads back to it: the garbage collector need not look.
    """

    lost: bool = False  # it waits, or is exhausted, because its ticket was lost: the journal does not know that
    out: Ticket | None = None  # the ticket of ISSUED
    holder: str | None = None  # the worker that has it; None after a crash
    since: float = NEVER  # when the holder got it: seconds, on the service's clock
    deadline: float = NEVER  # of its lease
    spent: float = 0.0  # seconds under former holders
    is_excused: bool = False  # the newest ticket does not count against the prompt
    frames: Sequence[Any] | None = None  # of the completed group; None where only the journal has them

    @property
    def all_excused(self) -> int:
        """Tickets that do not count against the prompt."""
        return self.excused + self.is_excused

    @property
    def recorded(self) -> Phase:
        """The phase that the journal knows."""
        if self.phase is WAITING or self.phase is EXHAUSTED:
            return ISSUED if self.lost else WAITING
        return CONSUMED if self.phase is QUARANTINED else self.phase

    def stored(self, step: int | None = None) -> Stored:
        """Its group, as `step` gets it. Raises KeyError unless it is completed."""
        if self.completed is None:
            raise KeyError(self.group_id)
        return Stored(
            group_id=self.group_id,
            attempt=self.completed.attempt,
            frames=self.frames,
            place=self.place,
            size=self.completed.size,
            tokens=self.completed.tokens,
            quarantined=self.quarantined if step is None else self.empty_at(step),
            again=step is not None and self.first is not None and self.first < step,
        )

    def slot(self) -> Slot:
        """The durable half."""
        durable = {name: getattr(self, name) for name in Slot.__struct_fields__}
        return Slot(**durable | {"phase": self.recorded})


class Lives(dict[int, Life]):
    """By group id.

    >>> lives = Lives()
    >>> life = lives.add(7, "copy", prompt_index=7)
    >>> lives.move(life, Event.ISSUE), lives.first_waiting
    (<Phase.ISSUED: 'issued'>, None)
    """

    def __init__(self) -> None:
        self.out: dict[int, Life] = {}  # ISSUED, in the order of issue
        self.exhausted: dict[int, Life] = {}  # EXHAUSTED
        self._held: defaultdict[str, dict[int, Life]] = defaultdict(dict)  # of `out`, by holder
        self._waiting: list[int] = []  # a heap of all that are WAITING; others are left in it until they come up
        self.emitted: list[tuple[str, dict[str, Any]]] = []  # events for the log, `events/replay-0.jsonl`

    @property
    def first_waiting(self) -> Life | None:
        """The oldest group that waits for a ticket."""
        while self._waiting:
            life = self.get(self._waiting[0])
            if life is not None and life.phase is WAITING:
                return life
            heapq.heappop(self._waiting)
        return None

    def add(self, group_id: int, task: str, prompt_index: int, *, is_next: bool = False) -> Life:
        """A new group waits for a ticket; `is_next`: it gets it at once."""
        life = self[group_id] = Life(group_id=group_id, task=task, prompt_index=prompt_index)
        if not is_next:
            heapq.heappush(self._waiting, group_id)
        return life

    def load(self, slots: Iterable[Slot]) -> None:
        """Begin with these; a ticket that was out is nobody's."""
        for slot in slots:
            life = self[slot.group_id] = Life(**msgspec.structs.asdict(slot))
            if life.phase is WAITING:
                heapq.heappush(self._waiting, life.group_id)
            elif life.phase is ISSUED:
                self.out[life.group_id] = life
            elif life.phase is CONSUMED and life.quarantined:
                self.move(life, QUARANTINE)

    def move(self, life: Life, event: Event) -> Phase:
        """Follow the table. Raises IllegalTransition."""
        before, group_id = life.phase, life.group_id
        after = life.phase = _after[before].get(event) or LIFE.next(before, event)
        if before is ISSUED is not after:
            if life.holder is not None:
                del self._held[life.holder][group_id]
                life.holder = None
            life.out = None
            del self.out[group_id]
        elif before is EXHAUSTED:
            del self.exhausted[group_id]
        if after is COMPLETED or after is CONSUMED:
            return after  # found by the state's own indexes
        if after is ISSUED:
            self.out[group_id] = life
        elif after is FORGOTTEN:
            del self[group_id]
        elif after is WAITING:
            life.lost = event is LOSE
            heapq.heappush(self._waiting, group_id)
        elif after is EXHAUSTED:
            self.exhausted[group_id] = life
        return after

    def assume(self, life: Life, event: Event) -> None:
        """The journal says that `event` follows: what must have happened before it and is not recorded, or lost."""
        for before in LIFE.path(life.phase, event):
            self.move(life, before)

    def hold(self, life: Life, holder: str) -> None:
        """The ticket that is out, and that nobody has, belongs to this worker."""
        life.holder = holder
        self._held[holder][life.group_id] = life

    def held(self, holder: str) -> int:
        """Tickets of this worker."""
        return len(self._held.get(holder, ()))

    def of(self, holder: str) -> list[Life]:
        """The groups whose tickets a worker has."""
        return list(self._held.get(holder, {}).values())

    def emit(self, event: str, /, **fields: Any) -> None:
        """Keep an event for the log."""
        self.emitted.append((event, fields))

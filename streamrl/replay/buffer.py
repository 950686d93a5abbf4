"""Which groups exist: the one authority, as a pure state machine without socket, clock or disk.

The life of a group, and of the slot that it occupies:

                      ┌──── lost: deadline, worker gone, bad content; attempt + 1 ────┐
                      ▼                                                               │
    (slot charged) ISSUED ──▶ COMPLETED ──▶ CONSUMED ──▶ (slot freed)      ISSUED ──▶ LOST
      issue()               complete()      take(step)    acknowledge(version that contains the step)

The slot is charged when the ticket is first issued and freed when a server has acknowledged weights that
contain the group's step: neither a reissue nor the learner's taking of a batch changes it. At most
`order.capacity` slots are charged at any time, and that alone bounds memory and staleness (`replay/order.py`).

A group is known by its id, one of its generations by (id, attempt): the first complete answer to the
current attempt is taken, every other one is refused. The frames of a consumed batch are kept until the
next step is asked for, so that a learner that lost the answer can ask again.

Told the same things in the same order, a buffer answers the same: time is an argument.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from streamrl.replay.order import Order
from streamrl.types import Group, PolicyVersion, Ticket


class State(Enum):
    ISSUED = "issued"
    LOST = "lost"
    COMPLETED = "completed"
    CONSUMED = "consumed"


class GroupRefused(Exception):
    """The group cannot be taken; the message says why."""


class AttemptsExhausted(RuntimeError):
    """A ticket was lost as often as it may be issued: the run cannot go on in strict order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A completed group: its identity, and its frames as they came."""

    group_id: int
    attempt: int
    frames: Sequence[Any]
    size: int  # bytes of the frames
    tokens: int  # generated


@dataclass(slots=True)
class _Slot:
    ticket: Ticket
    holder: str  # the worker that generates it
    state: State = State.ISSUED
    stored: Stored | None = None


class Buffer:
    """Tickets, slots, attempts, deadlines, batches and acknowledged versions of one incarnation of a learner."""

    def __init__(
        self,
        order: Order,
        *,
        start: PolicyVersion,
        last_step: int,
        task: str,
        seed: int,
        group_timeout: float,
        max_attempts: int,
    ) -> None:
        """`start` is the version that the learner begins with; tickets end before step `last_step`."""
        self.order = order
        self.start = start
        self.acknowledged: PolicyVersion | None = None  # newest weights of this incarnation on any server
        self.next_step = start.step  # the step that is taken next
        self._next_id = order.first(start.step)
        self._end_id = order.first(last_step)
        self._task = task
        self._seed = seed
        self._group_timeout = group_timeout
        self._max_attempts = max_attempts
        self._slots: dict[int, _Slot] = {}
        self._completed: set[int] = set()
        self._lost: list[int] = []  # a heap: the oldest group is issued again first
        self._delivered: tuple[Stored, ...] = ()  # the batch of step next_step - 1
        self._held: Counter[str] = Counter()  # open tickets of each worker
        self._bytes = 0

    @property
    def charged(self) -> int:
        """Slots in use, at most `order.capacity`."""
        return len(self._slots)

    @property
    def groups(self) -> int:
        """Completed groups that wait for the learner."""
        return len(self._completed)

    @property
    def bytes(self) -> int:
        """Size of their frames."""
        return self._bytes

    def state(self, group_id: int) -> State | None:
        """Where the group is; None before its ticket and after its slot."""
        slot = self._slots.get(group_id)
        return slot.state if slot else None

    def held(self, holder: str) -> int:
        """Tickets that this worker has and whose groups are not back."""
        return self._held[holder]

    def issue(self, holder: str, newest: PolicyVersion, now: float) -> Ticket | None:
        """The next ticket for a worker whose newest server is at `newest`; None when there is none for it."""
        if newest.incarnation != self.start.incarnation:
            return None
        if self._lost:
            group_id = self._lost[0]
            ticket = self._slots[group_id].ticket
            if newest < ticket.issued_version:
                return None
            heapq.heappop(self._lost)
            ticket = replace(ticket, attempt=ticket.attempt + 1, deadline=now + self._group_timeout)
        else:
            group_id = self._next_id
            required = self._required(group_id)
            if newest < required or not self._admitted(group_id):
                return None
            self._next_id += 1
            ticket = Ticket(
                group_id=group_id,
                task=self._task,
                prompt_index=group_id,
                seed=self._seed,
                issued_version=required,
                deadline=now + self._group_timeout,
            )
        self._slots[group_id] = _Slot(ticket, holder)
        self._held[holder] += 1
        return ticket

    def complete(self, holder: str, group: Group, frames: Sequence[Any], size: int) -> Stored:
        """Take a group. Raises GroupRefused unless it answers the current attempt of a ticket of this worker.

        A group that answers it with the wrong content is refused too, and its ticket is lost: at the last
        attempt that raises AttemptsExhausted.
        """
        slot = self._open(holder, group.group_id, group.attempt)
        if reason := _mismatch(group, slot.ticket):
            self._lose(group.group_id, reason)
            raise GroupRefused(reason)
        self._held[slot.holder] -= 1
        self._bytes += size
        slot.state = State.COMPLETED
        slot.stored = Stored(
            group_id=group.group_id, attempt=group.attempt, frames=frames, size=size, tokens=group.tokens
        )
        self._completed.add(group.group_id)
        return slot.stored

    def fail(self, holder: str, group_id: int, attempt: int, reason: str) -> None:
        """This attempt came to nothing. Raises GroupRefused as `complete` does, AttemptsExhausted at the last."""
        self._open(holder, group_id, attempt)
        self._lose(group_id, reason)

    def expire(self, now: float) -> list[Ticket]:
        """Tickets whose deadline has passed become lost. Raises AttemptsExhausted."""
        return self._lose_where(lambda slot: slot.ticket.deadline <= now, "its deadline passed")

    def release(self, holder: str) -> list[Ticket]:
        """The open tickets of a worker that is gone become lost. Raises AttemptsExhausted."""
        return self._lose_where(lambda slot: slot.holder == holder, f"worker {holder} is gone")

    def acknowledge(self, version: PolicyVersion) -> bool:
        """A server generates with `version`. True if that is news; other incarnations do not count."""
        if version.incarnation != self.start.incarnation or version.step < self.start.step:
            return False
        if self.acknowledged is not None and version <= self.acknowledged:
            return False
        self.acknowledged = version
        freed = self.order.evict(min(version.step, self.next_step))
        for group_id in [i for i in self._slots if i < freed]:
            del self._slots[group_id]
        return True

    def take(self, step: int) -> tuple[Stored, ...] | None:
        """The groups of a learner step, in order; None while they are not complete.

        The step before may be asked for again. Raises ValueError for any other step.
        """
        if step == self.next_step - 1 and self._delivered:
            return self._delivered
        if step != self.next_step:
            raise ValueError(f"step {step} was asked for, {self.next_step} is next")
        ids = self.order.select(step, self._completed)
        if ids is None:
            return None
        self._forget_delivered()
        slots = [self._slots[group_id] for group_id in ids]
        self._delivered = tuple(slot.stored for slot in slots if slot.stored is not None)
        for slot in slots:
            slot.state = State.CONSUMED
        self._completed.difference_update(ids)
        self._bytes -= sum(stored.size for stored in self._delivered)
        self.next_step += 1
        return self._delivered

    def _required(self, group_id: int) -> PolicyVersion:
        step = max(self.start.step, self.order.required_step(group_id))
        return PolicyVersion(step, self.start.incarnation)

    def _admitted(self, group_id: int) -> bool:
        if self.acknowledged is None or group_id >= self._end_id:
            return False
        return self.order.admit(group_id, min(self.acknowledged.step, self.next_step))

    def _open(self, holder: str, group_id: int, attempt: int) -> _Slot:
        slot = self._slots.get(group_id)
        if slot is None:
            known = "is trained already" if group_id < self._next_id else "was never issued"
            raise GroupRefused(f"group {group_id} {known}")
        if slot.state is not State.ISSUED or slot.ticket.attempt != attempt:
            raise GroupRefused(
                f"group {group_id} attempt {attempt}: attempt {slot.ticket.attempt} is {slot.state.value}"
            )
        if slot.holder != holder:
            raise GroupRefused(f"group {group_id} attempt {attempt} is the ticket of worker {slot.holder}")
        return slot

    def _lose_where(self, lost: Callable[[_Slot], bool], reason: str) -> list[Ticket]:
        slots = [slot for slot in self._slots.values() if slot.state is State.ISSUED and lost(slot)]
        for slot in slots:
            self._lose(slot.ticket.group_id, reason)
        return [slot.ticket for slot in slots]

    def _lose(self, group_id: int, reason: str) -> None:
        slot = self._slots[group_id]
        if slot.ticket.attempt + 1 >= self._max_attempts:
            raise AttemptsExhausted(
                f"group {group_id} was lost {self._max_attempts} times, last because {reason}; "
                "see replay.max_attempts, replay.group_timeout and the logs of the generators"
            )
        slot.state = State.LOST
        self._held[slot.holder] -= 1
        heapq.heappush(self._lost, group_id)

    def _forget_delivered(self) -> None:
        """Let go of the frames of the batch before; the slots stay charged until they are acknowledged."""
        for stored in self._delivered:
            if slot := self._slots.get(stored.group_id):
                slot.stored = None
        self._delivered = ()


def _mismatch(group: Group, ticket: Ticket) -> str | None:
    """Why a group does not answer its ticket. The version check is what the staleness bound rests on."""
    if (group.task, group.prompt_index) != (ticket.task, ticket.prompt_index):
        return f"it answers {group.task} prompt {group.prompt_index}, not {ticket.task} prompt {ticket.prompt_index}"
    required = ticket.issued_version
    for sample in group.samples:
        for span in sample.spans:
            if span.version.step < required.step or span.version.incarnation != required.incarnation:
                return f"tokens of version {span.version}, at least {required} is required"
    return None

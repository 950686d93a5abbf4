"""What the records of a buffer add up to: its durable state, live and recovered by the same code.

    state.apply(record)  for every record, once      ==      State(load(snapshot)) and the records after it

Nothing here decides: `replay/buffer.py` does, and says so in a record. A record that does not fit, because the
record before it was damaged, is taken for as much as it says.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import msgspec
import xxhash

from streamrl.replay.ledgers import ledger_of
from streamrl.replay.life import (
    COMPLETE,
    CONSUME,
    CONSUMED,
    DROP,
    FORGET,
    ISSUE,
    QUARANTINE,
    REGENERATE,
    RETURN,
    REUSE,
    TAKE_BACK,
    Event,
)
from streamrl.replay.lives import Life, Lives
from streamrl.replay.records import (
    Acknowledged,
    Adapted,
    AnyRecord,
    Began,
    Completed,
    Consumed,
    Dropped,
    Issued,
    Lost,
    Measured,
    Place,
    Quarantined,
    Saved,
    Snapshot,
)
from streamrl.replay.reusable import Reusable
from streamrl.replay.reuse import ONCE, Reuse
from streamrl.replay.shares import Shares
from streamrl.trainable import Limits
from streamrl.types import Ledger, PolicyVersion


class State:
    """The groups that matter still, the steps that can be asked for again, cursors and versions.

    A group id below `next_id` that has no record is settled for good: trained, and never delivered again.
    """

    def __init__(self, shares: Shares, reuse: Reuse = ONCE) -> None:
        self._shares = shares
        self.lives = Lives()
        self.completed: dict[int, int | None] = {}  # waits for the learner: step of its oldest token; by completion
        self.batches: dict[int, tuple[int, ...]] = {}  # consumed steps that can be asked for again, ascending
        self.next_id = 0
        self.next_step = 0
        self.floors: dict[int, int] = {}  # of steps to be put together again: C(v) by which tickets were issued
        self.below = 0  # the lowest id that is not consumed
        self.above: set[int] = set()  # consumed ids above it
        self.cursors = dict.fromkeys(shares.quotas, 0)
        self.began: PolicyVersion | None = None
        self.acknowledged: PolicyVersion | None = None
        self.limits: Limits | None = None  # of the learner that began last
        self.adapted: Adapted | None = None  # the last move of the adaptive bound
        self.reusable = Reusable(reuse, self.lives, shares.groups_per_step)
        self.history = {0: 0}  # step that can be asked for, or comes next: digest of what all steps before consumed

    @property
    def known(self) -> int:
        """The first step that can be asked for."""
        return next(iter(self.batches), self.next_step)

    def record(self, group_id: int) -> Completed:
        """Of a completed group."""
        record = self.lives[group_id].completed
        assert record is not None
        return record

    def recover(self, record: AnyRecord, place: Place | None = None) -> None:
        """One record of a journal, which does not say when a ticket was lost, and may have lost more than that."""
        match record:
            case Issued(ticket=ticket):
                self._assume(ISSUE, [ticket.group_id])
            case Completed(group_id=group_id):
                self._assume(COMPLETE, [group_id])
            case Dropped(group_id=group_id):
                self._assume(DROP, [group_id])
            case Consumed(group_ids=group_ids, reused=reused):
                self._assume(CONSUME, [group_id for group_id in group_ids if group_id not in reused])
                self._assume(REUSE, reused)
        self.apply(record, place)

    def apply(self, record: AnyRecord, place: Place | None = None) -> None:
        """One event; `place` is where the journal has the frames of a Completed."""
        match record:
            case Issued():
                self._issued(record)
            case Completed():
                self._completed(record, place)
            case Dropped():
                self._dropped(record)
            case Consumed():
                self._consumed(record)
            case Measured(step=step):
                self.reusable.measure(self.batches.get(step, ()), record)
            case Acknowledged(version=version):
                self.acknowledged = version
            case Lost(step=step, group_ids=group_ids):
                self._roll_back(step, frozenset(group_ids))
            case Quarantined(step=step, group_id=group_id, attempt=attempt):
                self._quarantine(group_id, attempt, step)
            case Saved(oldest=oldest):
                self._forget([step for step in self.batches if step < oldest])
            case Began():
                self._began(record)
            case Adapted():
                self.adapted = record

    def snapshot(self) -> Snapshot:
        """A copy of everything."""
        return Snapshot(
            slots=tuple(self.lives[group_id].slot() for group_id in sorted(self.lives)),
            completed=tuple(self.completed),
            batches=dict(self.batches),
            next_id=self.next_id,
            next_step=self.next_step,
            cursors=dict(self.cursors),
            began=self.began,
            acknowledged=self.acknowledged,
            limits=self.limits,
            history=dict(self.history),
            adapted=self.adapted,
            supply=self.reusable.counts,
            floors=dict(self.floors),
        )

    def load(self, snapshot: Snapshot) -> None:
        """Become what a snapshot says."""
        self.lives.load(snapshot.slots)
        self.batches = dict(snapshot.batches)
        self.next_id, self.next_step = snapshot.next_id, snapshot.next_step
        self.cursors |= snapshot.cursors
        self.began, self.acknowledged, self.limits = snapshot.began, snapshot.acknowledged, snapshot.limits
        self.history, self.adapted = dict(snapshot.history), snapshot.adapted
        self.reusable.load(snapshot.supply)
        self.floors = dict(snapshot.floors)
        self.reusable.index(self.batches)
        self._queue(snapshot.completed)
        self._count_settled()

    def ledger(self, step: int) -> Ledger:
        """What weights of `step` contain: every group that the steps before it consumed, and no other."""
        return ledger_of(self.lives, step, self.next_id, self.cursors, self.history.get(step))

    def redeliverable(self, step: int) -> tuple[int, tuple[int, ...]]:
        """The first consumed step from `step` on whose frames are not all there, and what is lost from it on."""
        lost = {
            later: [i for i in group_ids if self.lives[i].place is None and self.lives[i].frames is None]
            for later, group_ids in self.batches.items()
            if later >= step
        }
        resumed = min((later for later, group_ids in lost.items() if group_ids), default=self.next_step)
        return resumed, tuple(i for later, group_ids in lost.items() if later >= resumed for i in group_ids)

    def unknown(self, step: int, ledger: Ledger | None) -> tuple[int, ...]:
        """The consumed steps before `step` that weights of it need not have been trained on as the records say."""
        if step > self.next_step or (ledger is not None and self._contradicts(step, ledger)):
            return tuple(earlier for earlier in self.batches if earlier < step)
        return ()

    def oldest_place(self) -> int | None:
        """The lowest segment with frames that may be needed."""
        places = (life.place for life in self.lives.values())
        return min((place.segment for place in places if place), default=None)

    def reopen_placeless(self) -> None:
        """After a recovery: groups that wait for the learner, and whose frames are nowhere, are generated again."""
        for group_id in list(self.completed):
            if self.lives[group_id].place is None:
                self._regenerate(self.lives[group_id])

    def forget_batch(self, step: int) -> None:
        """A step whose frames are nowhere cannot be delivered again, and no step before it is asked for then."""
        self._forget([before for before in self.batches if before <= step])

    # -- records

    def _assume(self, event: Event, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            if (life := self.lives.get(group_id)) is not None:
                self.lives.assume(life, event)

    def _issued(self, record: Issued) -> None:
        ticket = record.ticket
        if (life := self._open_up_to(ticket.group_id)) is None:
            return
        self.lives.move(life, ISSUE)
        if life.completed is not None:  # its frames were lost, which the journal does not say
            self._empty(life)
            life.issues = 0
        life.task, life.prompt_index, life.out = ticket.task, ticket.prompt_index, ticket
        life.attempt, life.required = ticket.attempt, ticket.issued_version.step
        life.issues += 1
        life.excused, life.is_excused = record.excused, False

    def _open_up_to(self, group_id: int) -> Life | None:
        """Ids are given out one after another, and each takes the next prompt of its task. None: this one is over."""
        if group_id < self.next_id:
            return self.lives.get(group_id)
        for new in range(self.next_id, group_id + 1):
            task = self._shares.task(new)
            life = self.lives.add(new, task, self.cursors[task], is_next=new == group_id)
            self.cursors[task] += 1
        self.next_id = group_id + 1
        return life

    def _completed(self, record: Completed, place: Place | None) -> None:
        life = self.lives.get(record.group_id)
        if life is not None:
            self.lives.move(life, COMPLETE)
            life.completed, life.place, life.quarantined = record, place, False
            life.attempt = record.attempt
            self.completed[record.group_id] = record.oldest

    def _dropped(self, record: Dropped) -> None:
        life = self.lives.get(record.group_id)
        if life is None:
            return
        self.lives.move(life, DROP)
        self._empty(life)
        if not record.same_prompt:
            life.prompt_index, life.issues, life.excused, life.is_excused = record.prompt_index, 0, 0, False
            life.prompts += 1
            self.cursors[life.task] += 1

    def _regenerate(self, life: Life) -> None:
        """Its frames are nowhere; the tickets for them do not count towards `replay.max_attempts`."""
        self.lives.move(life, REGENERATE)
        self.lives.emit(REGENERATE, group_id=life.group_id, attempt=life.attempt)
        self._empty(life)
        life.issues, life.excused, life.is_excused = 0, 0, False

    def _empty(self, life: Life) -> None:
        """What is kept of its answer is not needed any more."""
        self.reusable.take_back(life)
        life.completed, life.place, life.frames, life.quarantined = None, None, None, False
        self.completed.pop(life.group_id, None)

    def _consumed(self, record: Consumed) -> None:
        lives, move, completed, step = self.lives, self.lives.move, self.completed, record.step
        if step != self.next_step:
            self._forget(list(self.batches))
        for group_id in record.group_ids:
            if (life := lives.get(group_id)) is not None:
                move(life, REUSE if group_id in record.reused else CONSUME)
                self.reusable.use(life, step)
                if life.quarantined:
                    move(life, QUARANTINE)
            completed.pop(group_id, None)
        self._chain(record)
        self.batches[record.step] = record.group_ids
        self.next_step = record.step + 1
        below, above = self.below, self.above
        above.update(group_id for group_id in record.group_ids if group_id >= below)
        while below in above:
            above.remove(below)
            below += 1
        self.below = below
        self._reach()
        self._disown(self.reusable.over(self.batches, self.next_step))

    def _chain(self, record: Consumed) -> None:
        """The digest behind a step: of the one before it, and of which prompts the step consumed under which ids."""
        before = self.history.get(record.step)
        if before is None:
            return
        lives = [self.lives.get(group_id) for group_id in record.group_ids]
        content = [(life.group_id, life.task, life.prompt_index) if life else None for life in lives]
        self.history[record.step + 1] = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(content), before)

    def _quarantine(self, group_id: int, attempt: int, step: int | None = None) -> None:
        """`step` and later ones get placeholders; None: the last one that had it, where earlier ones trained it."""
        life = self.lives.get(group_id)
        if life is not None and life.completed is not None and life.completed.attempt == attempt:
            if step is None and life.quarantined:
                return
            life.quarantined_from = (life.step or 0) if step is None and life.former else step or 0
            life.quarantined = True
            if life.phase is CONSUMED:
                self.lives.move(life, QUARANTINE)

    def _forget(self, steps: Iterable[int]) -> None:
        forgotten = [(step, self.batches.pop(step)) for step in steps]
        for _, group_ids in forgotten:
            self._remove(self.reusable.release(group_ids, self.batches, self.next_step))
        self.history = {step: digest for step, digest in self.history.items() if step >= self.known}
        self.floors = {step: count for step, count in self.floors.items() if step > self.known}
        self._reach()
        if forgotten:
            self.lives.emit(FORGET, steps=[step for step, _ in forgotten], **self.reusable.named)

    def _reach(self) -> None:
        self.reusable.reach(self.next_step, self.below + len(self.above), self.known)

    def _remove(self, group_ids: Iterable[int]) -> None:
        lives, move = self.lives, self.lives.move
        for group_id in group_ids:
            if (life := lives.get(group_id)) is not None:
                move(life, FORGET)
            self.reusable.forget(group_id)

    # -- a learner starts

    def _began(self, record: Began) -> None:
        step, ledger = record.version.step, record.ledger
        if step < self.known or (step > self.next_step if ledger is None else self._contradicts(step, ledger)):
            self._start_at(step, ledger)
        elif ledger is not None and step > self.next_step:
            self._forget(list(self.batches))
            self.next_step = step
            self._settle(ledger)
        elif record.next_step < self.next_step:
            self._roll_back(record.next_step, frozenset(record.lost))
        self.began, self.limits = record.version, record.limits
        for group_id, attempt in ledger.quarantined.items() if ledger else ():
            self._quarantine(group_id, attempt)

    def _contradicts(self, step: int, ledger: Ledger) -> bool:
        """Do these weights contain other groups, or other prompts under their ids, than the records say? So it is
        where the records that were lost had taken back, or dropped, some of those that are left."""
        if step > self.next_step:
            return False
        own = self.ledger(step)
        if own.history is not None and ledger.history is not None:
            return own.history != ledger.history
        return (own.below, own.above) != (ledger.below, ledger.above)

    def _start_at(self, step: int, ledger: Ledger | None) -> None:
        """Nothing that is known here leads to this step: its ledger alone counts, or whole steps without filters."""
        self._disown(list(self.lives))
        self.completed, self.batches = {}, {}
        self.next_step = step
        self.next_id = step * self._shares.groups_per_step if ledger is None else 0
        self.cursors = {task: quota * step for task, quota in self._shares.quotas.items()}
        self.history = {0: 0} if step == 0 else {}
        self.reusable.load({})
        self.floors = {}
        self._count_settled()
        if ledger is not None:
            self._settle(ledger)

    def _settle(self, ledger: Ledger) -> None:
        """The learner is further than the records, whose tail was lost: what it trained is settled, what it knew
        to be out is out with its prompts, and what was issued since without knowing of it is not."""
        above = frozenset(ledger.above)
        if ledger.history is not None:
            self.history = {self.next_step: ledger.history}
        self.next_id = max(ledger.below, *(i + 1 for i in chain(ledger.above, ledger.pending)), 0)
        self._disown([i for i in self.lives if i < ledger.below or i in above or i >= self.next_id])
        for group_id, (task, prompt_index) in ledger.pending.items():
            life = self.lives.get(group_id)
            if life is not None and (life.task, life.prompt_index) != (task, prompt_index):
                self._disown([group_id])
            if group_id not in self.lives:
                self.lives.add(group_id, task, prompt_index)
        self.cursors |= ledger.cursors
        self._queue(self.completed)
        self._count_settled()

    def _disown(self, group_ids: list[int]) -> None:
        """The learner's weights contain these, or know nothing of them."""
        self._remove(group_ids)
        if group_ids:
            self.lives.emit(FORGET, group_ids=group_ids)

    def _roll_back(self, step: int, lost: frozenset[int]) -> None:
        """The steps from `step` on are not consumed any more; of their groups, the lost ones are asked for again."""
        steps = [later for later in self.batches if later >= step]
        returned = dict.fromkeys(group_id for later in steps for group_id in self.batches.pop(later))
        found = [self.lives[group_id] for group_id in returned if group_id in self.lives]
        left = [tuple(use for use in life.uses if use < step) for life in found]
        for life, uses in zip(found, left, strict=True):
            self.lives.move(life, TAKE_BACK if uses else RETURN)
            self.reusable.take_back(life, uses)
        lives = [life for life in found if life.step is None]
        if shared := [life.group_id for life in found if life.step is not None]:
            self.lives.emit(TAKE_BACK, step=step, group_ids=shared)
        if lives:
            self.lives.emit(RETURN, step=step, group_ids=[life.group_id for life in lives])
        for life in [life for life in lives if life.group_id in lost]:
            self._regenerate(life)
        for known, count in self.reusable.counts.items():
            if known > step:
                self.floors[known] = max(count, self.floors.get(known, 0))
        self.next_step = step
        self.history = {known: digest for known, digest in self.history.items() if known <= step}
        self.reusable.index(self.batches)
        self._queue((*returned, *self.completed))
        self._count_settled()

    def _queue(self, group_ids: Iterable[int]) -> None:
        """Those of them that are complete wait for the learner, in this order."""
        lives = [self.lives[group_id] for group_id in group_ids if group_id in self.lives]
        self.completed = {
            life.group_id: life.completed.oldest for life in lives if life.completed and life.step is None
        }

    def _count_settled(self) -> None:
        waiting = {group_id for group_id, life in self.lives.items() if life.step is None}
        self.below = min(waiting, default=self.next_id)
        self.above = {group_id for group_id in range(self.below, self.next_id) if group_id not in waiting}
        self._reach()

"""Which groups exist: the one authority, as a pure state machine without socket, clock or disk.

What can happen to a group is the table of `replay/life.py`, what is known of it one record (`replay/lives.py`). A slot
is charged when the group's first ticket is issued and freed when a server has acknowledged weights that contain the
group's step. At most `order.capacity` slots are charged, and that alone bounds memory and staleness
(`replay/orders/`); `replay/release_gate.py` may hold a ticket back for longer. A group is known by its id, one of its
generations by (id, attempt): the first complete answer to the current attempt is taken, every other one is refused.

Every change that outlives a crash is a record: the buffer decides, applies it to its state (`replay/state.py`), and
keeps it for `drain`, from where it goes to the journal. Leases, frames and the audit are the process's own: what
happens to them is in `emitted`.

Told the same things in the same order, a buffer answers the same: time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from streamrl.config import Config
from streamrl.config.replay import FilterConfig
from streamrl.replay.adaptive import AdaptiveBound
from streamrl.replay.batches import Batches
from streamrl.replay.curricula import make_curriculum
from streamrl.replay.curricula.base import Curriculum
from streamrl.replay.leases import Leases
from streamrl.replay.life import DROP, LOSE, WAITING, Phase
from streamrl.replay.lives import NEVER, Life
from streamrl.replay.orders import make_order
from streamrl.replay.orders.base import Order
from streamrl.replay.records import (
    Acknowledged,
    Adapted,
    AnyRecord,
    Began,
    Completed,
    Dropped,
    Issued,
    Lost,
    Measured,
    Place,
    Quarantined,
    Saved,
    Snapshot,
    Stored,
)
from streamrl.replay.refusals import GroupRefused, refusal
from streamrl.replay.release_gate import ReleaseGate
from streamrl.replay.releases import make_release
from streamrl.replay.releases.base import Release
from streamrl.replay.reuse import Reuse, make_reuse
from streamrl.replay.selection import Audit, measure, mismatch, reason_to_drop
from streamrl.replay.shares import Shares, make_shares
from streamrl.replay.state import State
from streamrl.trainable import Limits
from streamrl.types import Group, Ledger, PolicyVersion, Ticket


class Buffer:
    """Tickets, slots, batches and acknowledged versions of a run."""

    def __init__(
        self,
        order: Order,
        *,
        shares: Shares,
        curriculum: Curriculum,
        adaptive: AdaptiveBound,
        release: Release,
        publish_every: int,
        reuse: Reuse,
        filters: FilterConfig,
        last_step: int,
        seed: int,
        lease: float,
        group_timeout: float,
        max_attempts: int,
    ) -> None:
        """Tickets end before step `last_step`. Times are in seconds.

        A worker ends a group by itself at `group_timeout`; the buffer gives it up one lease later.
        """
        self.order = order
        self.adaptive = adaptive
        self._shares = shares
        self._curriculum = curriculum
        self._filters = filters if filters.active else None
        self._reuse = reuse
        self._last_step = last_step
        self._seed = seed
        self._lease = lease
        self._state = State(shares, reuse)
        self._lives = self._state.lives
        self.gate = ReleaseGate(release, self._state, publish_every)
        self._records: list[AnyRecord] = []
        self.emitted = self._lives.emitted  # (event, fields), for the log: what happened to groups, and no answer says
        self._leases = Leases(self._lives, lease, group_timeout + lease, max_attempts)
        self._audit = Audit()
        self._batches = Batches(
            self._state,
            order,
            self.gate,
            self._audit,
            reuse=reuse,
            adaptive=adaptive,
            emit=self._emit,
            drop=self._regenerate,
        )

    # -- what there is

    @property
    def began(self) -> PolicyVersion | None:
        """The version that the learner started with last; no ticket is issued before."""
        return self._state.began

    @property
    def acknowledged(self) -> PolicyVersion | None:
        """The newest weights that any server ever had, in any incarnation."""
        return self._state.acknowledged

    @property
    def limits(self) -> Limits | None:
        """What the learner that began last can train; None where it has not said."""
        return self._state.limits

    @property
    def tasks(self) -> frozenset[str]:
        """The tasks that get tickets."""
        return frozenset(self._shares.quotas)

    @property
    def next_step(self) -> int:
        """The first step that is not consumed."""
        return self._state.next_step

    @property
    def charged(self) -> int:
        """Slots in use."""
        return self._state.next_id - self._first(self._contained)

    @property
    def groups(self) -> int:
        """Completed groups that wait for the learner."""
        return len(self._state.completed)

    @property
    def bytes(self) -> int:
        """Size of their frames."""
        return sum(self._state.record(group_id).size for group_id in self._state.completed)

    def phase(self, group_id: int) -> Phase | None:
        """How far the group is; None before its ticket, and when its step can never be delivered again."""
        life = self._lives.get(group_id)
        return None if life is None else life.phase

    def held(self, holder: str) -> int:
        """Tickets that this worker has and whose groups are not back."""
        return self._lives.held(holder)

    def tickets(self, holder: str) -> tuple[tuple[int, int], ...]:
        """Their (group id, attempt)."""
        return tuple((life.group_id, life.attempt) for life in self._lives.of(holder))

    def ledger(self) -> Ledger:
        """What the weights contain once the batch taken last is trained."""
        return self._state.ledger(self._batches.trained)

    def oldest_place(self) -> int | None:
        """The lowest journal segment that holds frames which may be needed; None without any."""
        return self._state.oldest_place()

    def selection_metrics(self) -> dict[str, float]:
        """The audit since the last call, by the names of its metrics: called once a batch."""
        held = self.gate.metrics(self.adaptive.slots - self.charged)
        return self._audit.collect() | self.adaptive.metrics() | held | self._reuse.metrics(self._batches.reused)

    # -- what outlives a crash

    def drain(self) -> list[AnyRecord]:
        """The records since the last call, in order: for the journal. `placed` then says where each Completed is."""
        records, self._records = self._records, []
        return records

    def stored(self, group_id: int) -> Stored:
        """A completed group. Raises KeyError where it is not completed any more."""
        return self._lives[group_id].stored()

    def placed(self, group_id: int, place: Place) -> None:
        """The journal has written the Completed of this group there."""
        if (life := self._lives.get(group_id)) is not None:
            life.place = place

    def snapshot(self) -> Snapshot:
        """The whole durable state; call it with nothing left to drain."""
        return self._state.snapshot()

    def restore(self, snapshot: Snapshot | None, records: Iterable[AnyRecord | tuple[Completed, Place]] = ()) -> None:
        """Become what a journal says. Tickets that were out are nobody's, with a fresh lease.

        A Completed without a place is one whose frames cannot be read: its group is generated again.
        """
        if snapshot is not None:
            self._state.load(snapshot)
        for record in records:
            self._state.recover(*record if isinstance(record, tuple) else (record,))
        self.emitted.clear()  # they were emitted when it happened
        self.adaptive.restore(self._state.adapted)
        self._state.reopen_placeless()
        self._batches.trained = self._state.next_step
        for life in self._lives.out.values():
            life.out = life.ticket(self._seed, NEVER)
        self._leases.recover()
        for life in [life for life in self._lives.values() if life.phase is WAITING]:
            self._leases.exhaust(life)

    def begin(self, version: PolicyVersion, ledger: Ledger | None = None, limits: Limits | None = None) -> None:
        """A learner starts, or starts again, with weights `version`; its checkpoint's `ledger` says what is in them.

        Steps from there on that were consumed are delivered again, as they were. Where frames of one are
        nowhere, its missing groups are generated again, and those steps are put together again.
        """
        resumed, lost = self._state.redeliverable(version.step)
        unknown = self._state.unknown(version.step, ledger)
        self._emit(Began(version=version, ledger=ledger, next_step=resumed, lost=lost, limits=limits, unknown=unknown))
        self.gate.began(version.step, self._lives)
        self._batches.trained = version.step

    def lose(self, step: int, group_ids: Iterable[int]) -> None:
        """The frames of these groups of a consumed step cannot be read: they are generated again, with the same
        prompts. The steps from `step` on, which the learner has not trained yet, are put together again.
        """
        self._emit(Lost(step=step, group_ids=tuple(group_ids)))
        self._batches.trained = step

    def quarantine(self, step: int, group_id: int, attempt: int, reason: str) -> bool:
        """The learner could not train a group of this consumed step. False where that is known, or cannot be."""
        life = self._lives.get(group_id)
        if life is None or life.completed is None or life.empty_at(step):
            return False
        if step not in life.uses or life.completed.attempt != attempt:
            return False
        self._emit(Quarantined(step=step, group_id=group_id, attempt=attempt, reason=reason))
        return True

    def saved(self, oldest: int) -> None:
        """The oldest checkpoint that is kept has step `oldest`: the steps before it are forgotten."""
        self._emit(Saved(oldest=oldest))

    def acknowledge(self, version: PolicyVersion) -> bool:
        """A server generates with `version`. True if that is news."""
        if self._state.acknowledged is not None and version <= self._state.acknowledged:
            return False
        self._emit(Acknowledged(version=version))
        return True

    def progress(self, version: PolicyVersion, signals: Mapping[str, float]) -> Adapted | None:
        """The learner has made `version`, with these signals of its step. Returns a move of the adaptive bound."""
        if (move := self.adaptive.record(version.step, signals)) is not None:
            self._emit(move)
        return move

    def measured(self, step: int, ess: Sequence[float | None]) -> None:
        """The effective sample size of each group of a step, as the learner trained it; None: nothing was learned."""
        if self._state.reusable.lacks(step, self._state.batches.get(step, ()), ess):
            self._emit(Measured(step=step, ess=tuple(ess)))

    # -- tickets

    @property
    def required(self) -> int | None:
        """The step of the weights that the next ticket asks for; None while there is no next one."""
        return self._required(self._lives.first_waiting)

    def issue(self, holder: str, newest: PolicyVersion, now: float) -> Ticket | None:
        """The next ticket for a worker whose newest server is at `newest`; None when there is none for it."""
        state, waiting = self._state, self._lives.first_waiting
        if self.gate.due_at <= now:
            self.gate.tick(now)
        required = self._required(waiting)
        if required is None or newest.step < required:
            return None
        if waiting is None:
            group_id = state.next_id
            task, attempt = self._shares.task(group_id), 0
            prompt_index = self._curriculum.choose(task, state.cursors[task])
        else:
            group_id, task, prompt_index = waiting.group_id, waiting.task, waiting.prompt_index
            attempt = waiting.attempt + 1
            self._audit.counts["reissued"] += waiting.issues > 0
        ticket = Ticket(
            group_id=group_id,
            attempt=attempt,
            task=task,
            prompt_index=prompt_index,
            seed=self._seed,
            issued_version=PolicyVersion(required),
            deadline=now + self._lease,
        )
        self._emit(Issued(ticket=ticket, excused=0 if waiting is None else waiting.all_excused))
        self._leases.grant(self._lives[group_id], holder, now)
        return ticket

    def extend(self, holder: str, tickets: Iterable[tuple[int, int]], now: float) -> None:
        """A heartbeat: the worker generates these (group id, attempt), or has them finished."""
        self._leases.extend(holder, tickets, now)

    def adopt(self, holder: str, tickets: Iterable[tuple[int, int]], now: float) -> None:
        """A worker comes back with these (group id, attempt): those that are its own or nobody's it keeps."""
        self._leases.adopt(holder, tickets, now)

    def release(self, holder: str, *, excused: bool = False) -> list[Ticket]:
        """The worker is gone for good: its open tickets are to be issued again.

        `excused`: it left because it was asked to, and they do not count towards `replay.max_attempts`.
        """
        reason = "its worker was told to end" if excused else "its worker is gone"
        return self._give_back(self._lives.of(holder), reason, excused=excused)

    def expire(self, now: float) -> list[Ticket]:
        """The tickets whose lease is over are to be issued again."""
        return self._give_back(self._leases.expired(now), "its lease is over", event="ticket.expired")

    def fail(self, holder: str, group_id: int, attempt: int, reason: str, *, excused: bool = False) -> None:
        """This attempt came to nothing; `excused`: it does not count towards `replay.max_attempts`.

        Raises GroupRefused as `complete` does.
        """
        self._give_back([self._open(holder, group_id, attempt)], reason, excused=excused)

    def complete(self, holder: str, group: Group, frames: Sequence[Any], size: int) -> Completed | None:
        """Take a group. None: a filter dropped it, its place gets another prompt, and the worker may forget it.

        Raises DuplicateGroup where this attempt was taken before, and GroupRefused unless it answers the current
        attempt of a ticket of this worker. One that answers it with the wrong content is refused, and its
        ticket is lost.
        """
        life = self._open(holder, group.group_id, group.attempt)
        record = measure(group, size)
        assert life.out is not None
        if reason := mismatch(group, record, life.out):
            self._give_back([life], reason)
            raise GroupRefused(reason)
        return self._accept(life, group, record, frames)

    def exhausted(self) -> list[Ticket]:
        """Tickets that will not be issued again: each of these groups is to be completed as a placeholder, which is an
        attempt of its own.
        """
        tickets = [life.ticket(self._seed, 0.0) for life in self._lives.exhausted.values()]
        return [replace(ticket, attempt=ticket.attempt + 1) for ticket in tickets]

    def complete_placeholder(self, group: Group, frames: Sequence[Any], size: int) -> Completed | None:
        """Take a group of placeholders for an exhausted ticket. Raises GroupRefused unless it is for one."""
        life = self._lives.exhausted.get(group.group_id)
        if life is None or life.attempt + 1 != group.attempt:
            raise GroupRefused(f"group {group.group_id} attempt {group.attempt} is not exhausted")
        self._audit.counts["placeholders"] += 1
        return self._accept(life, group, measure(group, size), frames)

    # -- batches

    def pop(self, step: int) -> tuple[Stored, ...] | None:
        """The groups of a learner step, in order; None while they are not complete.

        A step that was consumed may be asked for again, as long as it may be needed. Raises ValueError for
        any other.
        """
        return self._batches.pop(step)

    # -- inside

    def _required(self, waiting: Life | None) -> int | None:
        """`required`, where this is the oldest group that waits."""
        state = self._state
        group_id = state.next_id if waiting is None else waiting.group_id
        if state.began is None or state.acknowledged is None or group_id >= self._first(self._last_step):
            return None
        if waiting is None and group_id >= self.gate.limit:
            return None
        supply = state.reusable.supplied
        required = self.order.required_step(group_id, state.next_step, self.adaptive.slots, *supply)
        return required if required <= self._contained else None

    def _first(self, step: int) -> int:
        """Groups that weights of `step` contain, at most."""
        supply = self._state.reusable.supply
        return self.order.first(step) if supply is None else supply.before(step)

    @property
    def _contained(self) -> int:
        """v: the step whose groups have their slots freed."""
        acknowledged, next_step = self._state.acknowledged, self._state.next_step
        return acknowledged.step if acknowledged and acknowledged.step < next_step else next_step

    def _emit(self, record: AnyRecord) -> None:
        self._state.apply(record)
        self.gate.record(record)
        self._records.append(record)

    def _accept(self, life: Life, group: Group, record: Completed, frames: Sequence[Any]) -> Completed | None:
        self._audit.generated.add(record)
        self._curriculum.record(life.task, life.prompt_index, record.pass_rate)
        if self._filters is not None and life.prompts < self._filters.tries:
            reason = reason_to_drop(group, record, self._filters)
            if reason is not None:
                self._audit.dropped.add(record)
                self._drop(life, record, reason, same_prompt=False)
                return None
        life.frames, life.spent = frames, 0.0  # what may be issued for it next has its whole time
        self._emit(record)
        return record

    def _regenerate(self, life: Life, reason: str) -> None:
        """A completed group is generated again, with its prompt."""
        self._drop(life, self._state.record(life.group_id), reason, same_prompt=True)

    def _drop(self, life: Life, record: Completed, reason: str, *, same_prompt: bool) -> None:
        cursor = self._state.cursors[life.task]
        prompt_index = life.prompt_index if same_prompt else self._curriculum.choose(life.task, cursor)
        key = {"group_id": life.group_id, "attempt": life.attempt}
        self._lives.emit(DROP, worker=life.holder, tokens=record.tokens, reason=reason, **key)
        self._emit(Dropped(**key, reason=reason, same_prompt=same_prompt, prompt_index=prompt_index))
        life.spent = 0.0
        self._leases.exhaust(life)

    def _give_back(
        self, lives: Iterable[Life], reason: str, *, event: str = LOSE, excused: bool = False
    ) -> list[Ticket]:
        """These tickets are out no longer, and their groups not complete."""
        tickets = []
        for life in lives:
            assert life.out is not None
            tickets.append(life.out)
            key = {"group_id": life.group_id, "attempt": life.attempt}
            self._lives.emit(event, worker=life.holder, reason=reason, **key)
            self._leases.end(life, excused=excused)
            self._leases.exhaust(life)
        return tickets

    def _open(self, holder: str, group_id: int, attempt: int) -> Life:
        """The group that an answer is for. Nobody's, after a crash, is anybody's who answers it."""
        life = self._lives.out.get(group_id)
        if life is not None and life.attempt == attempt and (life.holder is None or life.holder == holder):
            return life
        refused = refusal(group_id, attempt, self._lives.get(group_id), self._state.next_id)
        self._audit.counts["late_duplicates"] += refused.is_late
        raise refused


def make_buffer(config: Config) -> Buffer:
    """The buffer of a run. Raises ValueError where an order would deadlock."""
    replay, every = config.replay, config.publish.every
    order = make_order(replay, every)
    return Buffer(
        order,
        shares=make_shares(config),
        curriculum=make_curriculum(replay, config.run.seed),
        adaptive=AdaptiveBound(replay.adaptive, order, replay.bound, every),
        release=make_release(replay),
        publish_every=every,
        reuse=make_reuse(replay),
        filters=replay.filter,
        last_step=config.run.steps,
        seed=config.run.seed,
        lease=replay.lease,
        group_timeout=replay.group_timeout,
        max_attempts=replay.max_attempts,
    )

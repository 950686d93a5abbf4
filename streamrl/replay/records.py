"""The events that a buffer's durable state is made of, and its snapshot: what the journal holds.

A buffer applies each of them once when it happens and once more when it is recovered, by the same code
(`replay/state.py`); what they do to a group is in `replay/life.py`. Deadlines and holders are not among them: after a
crash every open ticket has a fresh lease and is nobody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.replay.life import Phase
from streamrl.trainable import Limits
from streamrl.types import Ledger, PolicyVersion, Ticket


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One event of the buffer."""


class Began(Record, frozen=True, kw_only=True):
    """A learner starts, or starts again, at `version`; what it trained beyond is delivered again."""

    version: PolicyVersion
    ledger: Ledger | None = None
    next_step: int  # the first step that is not delivered as it was before
    lost: tuple[int, ...] = ()  # groups of the steps from there on whose frames are nowhere: generated again
    limits: Limits | None = None  # of this learner
    # steps before `version` that need not have been trained as recorded: later records of them may be lost
    unknown: tuple[int, ...] = ()


class Issued(Record, frozen=True, kw_only=True):
    """A ticket is out, for the first time or again."""

    ticket: Ticket
    excused: int = 0  # tickets before it that do not count against the prompt


class Completed(Record, frozen=True, kw_only=True):
    """A group was accepted. In the journal its two frames follow this record."""

    group_id: int
    attempt: int
    size: int  # bytes of the frames
    tokens: int  # generated
    oldest: int | None = None  # step of the oldest version among its tokens; None without tokens
    answers: int = 0  # samples that are no placeholders
    pass_rate: float = 0.0  # share of right ones among them


class Dropped(Record, frozen=True, kw_only=True):
    """A completed group was filtered out: its place gets another prompt, or the same one again where it was too old."""

    group_id: int
    attempt: int
    reason: str
    same_prompt: bool = False
    prompt_index: int  # what is asked in its place


class Consumed(Record, frozen=True, kw_only=True):
    """The groups of a learner step, in order. Durable before the batch is delivered."""

    step: int
    group_ids: tuple[int, ...]
    reused: tuple[int, ...] = ()  # those of them that an earlier step had


class Measured(Record, frozen=True, kw_only=True):
    """The effective sample sizes of the groups of a step, as it trained them: which of them may be trained again."""

    step: int
    ess: tuple[float | None, ...]  # 0..1, in the order of Consumed; None: nothing was learned from the group


class Lost(Record, frozen=True, kw_only=True):
    """The frames of some groups of a consumed step cannot be read: the steps from it on are put together again."""

    step: int
    group_ids: tuple[int, ...]


class Quarantined(Record, frozen=True, kw_only=True):
    """The learner could not train this group of a consumed step: placeholders take its place."""

    step: int
    group_id: int
    attempt: int
    reason: str


class Acknowledged(Record, frozen=True, kw_only=True):
    """A server generates with `version`, the newest so far."""

    version: PolicyVersion


class Saved(Record, frozen=True, kw_only=True):
    """The oldest checkpoint that is kept has step `oldest`: steps before it are never delivered again."""

    oldest: int


class Adapted(Record, frozen=True, kw_only=True):
    """The adaptive bound has moved, after learner step `step`. Staleness in learner steps."""

    step: int
    former: float
    staleness: float  # admitted from now on
    reason: str
    memory: dict[str, float] = {}  # of its controller (`replay/controllers/`)
    controller: str = ""  # by its name; unknown in journals from before


AnyRecord = (
    Began | Issued | Completed | Dropped | Consumed | Measured | Lost | Quarantined | Acknowledged | Saved | Adapted
)


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a group's frames are in the journal."""

    segment: int  # number
    offset: int  # bytes, of its record


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A completed group: its identity, and its frames as they came, or where they are."""

    group_id: int
    attempt: int
    frames: Sequence[Any] | None  # None: only the journal has them
    place: Place | None  # None: not in a journal
    size: int  # bytes of the frames
    tokens: int  # generated
    quarantined: bool = False  # it is delivered as placeholders
    again: bool = False  # an earlier step had it


class Slot(msgspec.Struct, kw_only=True):
    """What the journal knows of one group, from its first ticket until its step can never be delivered again."""

    group_id: int
    task: str
    prompt_index: int
    phase: Phase = Phase.WAITING  # one of WAITING, ISSUED, COMPLETED, CONSUMED
    attempt: int = -1  # of its newest ticket; -1 before the first
    issues: int = 0  # tickets for this prompt
    excused: int = 0  # of them, those before the newest that do not count against it
    prompts: int = 1  # prompts that this place has had, the present one included
    required: int = 0  # oldest step whose weights may generate it, of its newest ticket
    completed: Completed | None = None
    place: Place | None = None
    step: int | None = None  # that consumed it, the last one
    former: tuple[int, ...] = ()  # steps that consumed it before, ascending
    ess: float | None = None  # effective sample size, measured by `step`
    quarantined: bool = False  # the learner could not train its completed attempt
    quarantined_from: int = 0  # the first step that gets it as placeholders

    @property
    def uses(self) -> tuple[int, ...]:
        """The steps that consumed it."""
        return self.former if self.step is None else (*self.former, self.step)

    @property
    def first(self) -> int | None:
        """The first step that consumed it."""
        return self.former[0] if self.former else self.step

    def empty_at(self, step: int) -> bool:
        """Does this step get placeholders in its place?"""
        return self.quarantined and step >= self.quarantined_from

    def ticket(self, seed: int, deadline: float) -> Ticket:
        """Its newest ticket."""
        return Ticket(
            group_id=self.group_id,
            attempt=self.attempt,
            task=self.task,
            prompt_index=self.prompt_index,
            seed=seed,
            issued_version=PolicyVersion(self.required),
            deadline=deadline,
        )


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole durable state of a buffer: the first record of a journal segment."""

    slots: tuple[Slot, ...] = ()  # ascending ids
    completed: tuple[int, ...] = ()  # groups that wait for the learner, in the order of completion
    batches: dict[int, tuple[int, ...]] = {}  # steps that can still be asked for again, with their groups
    next_id: int = 0
    next_step: int = 0
    cursors: dict[str, int] = {}  # prompts of each task that have been asked for
    began: PolicyVersion | None = None  # the learner's latest start
    acknowledged: PolicyVersion | None = None
    limits: Limits | None = None
    history: dict[int, int] = {}  # steps that can still be asked for, and the next: digest of all steps before
    adapted: Adapted | None = None  # the last move of the adaptive bound
    supply: dict[int, int] = {}  # steps that matter still: groups that the steps before consumed; with reuse alone
    floors: dict[int, int] = {}  # the same of steps that are put together again: they may have no fewer than before

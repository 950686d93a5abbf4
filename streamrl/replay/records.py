"""The events that a buffer's durable state is made of, and its snapshot: what the journal holds.

    Began ─▶ Issued ─▶ Completed ─▶ Consumed ─▶ Saved          Dropped: back to before Issued, with another prompt
                 └▶ Issued again (attempt + 1)                 Acknowledged: a server has new weights

A buffer applies each of them once when it happens and once more when it is recovered, by the same code.
Deadlines and holders are not among them: after a crash every open ticket has a fresh lease and is nobody's.
"""

from __future__ import annotations

import msgspec

from streamrl.types import Ledger, PolicyVersion, Ticket


class Record(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One event of the buffer."""


class Began(Record, frozen=True, kw_only=True):
    """A learner starts, or starts again, at `version`; what it trained beyond is delivered again."""

    version: PolicyVersion
    ledger: Ledger | None = None


class Issued(Record, frozen=True, kw_only=True):
    """A ticket is out, for the first time or again."""

    ticket: Ticket


class Completed(Record, frozen=True, kw_only=True):
    """A group was accepted. In the journal its two frames stand behind this."""

    group_id: int
    attempt: int
    size: int  # bytes of the frames
    tokens: int  # generated
    oldest: int | None = None  # step of the oldest version among its tokens; None without tokens


class Dropped(Record, frozen=True, kw_only=True):
    """A completed group was filtered out: its place gets another prompt, or the same one again where it was too old."""

    group_id: int
    attempt: int
    reason: str
    same_prompt: bool = False


class Consumed(Record, frozen=True, kw_only=True):
    """The groups of a learner step, in order. Durable before the batch is delivered."""

    step: int
    group_ids: tuple[int, ...]


class Acknowledged(Record, frozen=True, kw_only=True):
    """A server generates with `version`, the newest so far."""

    version: PolicyVersion


class Saved(Record, frozen=True, kw_only=True):
    """The oldest checkpoint that is kept has step `oldest`: steps before it are never delivered again."""

    oldest: int


AnyRecord = Began | Issued | Completed | Dropped | Consumed | Acknowledged | Saved


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a group's frames stand in the journal."""

    segment: int  # number
    offset: int  # bytes, of its record

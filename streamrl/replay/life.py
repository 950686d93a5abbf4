"""A group's life: every state that it can be in, and every event that leads from one to the next.

The slot is charged with the first ISSUE and freed when a server has acknowledged weights that contain the step of the
CONSUME; a REUSE takes none. `replay/lives.py` moves each record through this table. The value of an event is its name
in `events/replay-0.jsonl`; LOSE, EXHAUST and ADOPT are not in the journal: after a crash a group that was lost is out
until its lease is over once more.
"""

from __future__ import annotations

from enum import StrEnum

from streamrl.machine import Machine


class Phase(StrEnum):
    """How far a group is."""

    WAITING = "waiting"  # for a ticket: the last one was lost, or the group is to be generated again
    ISSUED = "issued"  # a ticket is out
    EXHAUSTED = "exhausted"  # no further ticket: it had too many, or too much time; placeholders take its place
    COMPLETED = "completed"  # it waits for the learner
    CONSUMED = "consumed"  # a step has it; that step may be delivered again
    QUARANTINED = "quarantined"  # the same, and the learner could not train it: delivered as placeholders
    FORGOTTEN = "forgotten"  # trained in every checkpoint that is kept, or unknown to the learner's weights: no record


class Event(StrEnum):
    """What happens to a group."""

    ISSUE = "tickets"
    ADOPT = "ticket.adopted"  # after a crash of the service: the worker that has the ticket names it
    LOSE = "ticket.lost"  # its lease is over, its worker is gone, its content is refused
    EXHAUST = "group.exhausted"
    COMPLETE = "group.accepted"  # an answer, or placeholders
    DROP = "group.dropped"  # by a filter, or too old
    CONSUME = "batch"
    REUSE = "group.reused"  # a further step has it
    TAKE_BACK = "use.returned"  # its last step is put together again, an earlier one keeps it
    QUARANTINE = "group.quarantined"
    RETURN = "groups.returned"  # its step is put together again
    REGENERATE = "group.regenerated"  # its frames cannot be read
    FORGET = "groups.forgotten"


# By themselves: in Python 3.11 an attribute of an enum takes 0.2 us, and a group comes past some twenty of them.
WAITING, ISSUED, EXHAUSTED, COMPLETED, CONSUMED, QUARANTINED, FORGOTTEN = Phase
ISSUE, ADOPT, LOSE, EXHAUST, COMPLETE, DROP, CONSUME, REUSE, TAKE_BACK, QUARANTINE, RETURN, REGENERATE, FORGET = Event

LIFE = Machine(
    "A group",
    {
        (WAITING, ISSUE): ISSUED,
        (WAITING, EXHAUST): EXHAUSTED,
        (ISSUED, ADOPT): ISSUED,
        (ISSUED, LOSE): WAITING,
        (ISSUED, COMPLETE): COMPLETED,
        (EXHAUSTED, COMPLETE): COMPLETED,
        # A filter drops an answer before it is accepted, and an order what has waited for too long.
        (ISSUED, DROP): WAITING,
        (EXHAUSTED, DROP): WAITING,
        (COMPLETED, DROP): WAITING,
        (COMPLETED, REGENERATE): WAITING,
        (COMPLETED, CONSUME): CONSUMED,
        # At most `replay.reuse` steps have it; what is quarantined has no further one.
        (CONSUMED, REUSE): CONSUMED,
        (CONSUMED, TAKE_BACK): CONSUMED,
        (QUARANTINED, TAKE_BACK): QUARANTINED,
        (CONSUMED, QUARANTINE): QUARANTINED,
        # A group that was quarantined stays so: the next CONSUME is followed by QUARANTINE at once.
        (CONSUMED, RETURN): COMPLETED,
        (QUARANTINED, RETURN): COMPLETED,
        # A learner that is further than the journal, or on another history, has trained or never known the others.
        (CONSUMED, FORGET): FORGOTTEN,
        (QUARANTINED, FORGET): FORGOTTEN,
        (WAITING, FORGET): FORGOTTEN,
        (ISSUED, FORGET): FORGOTTEN,
        (EXHAUSTED, FORGET): FORGOTTEN,
        (COMPLETED, FORGET): FORGOTTEN,
    },
    WAITING,
)

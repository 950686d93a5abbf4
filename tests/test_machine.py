"""A state machine runs on its table, and its pictures are drawn from it."""

from __future__ import annotations

from enum import Enum

import pytest

from streamrl.machine import IllegalTransition, Machine


class State(Enum):
    IDLE = "idle"
    BUSY = "busy"
    GONE = "gone"


class Event(Enum):
    START = "start"
    END = "end"
    LEAVE = "leave"


TABLE = {
    (State.IDLE, Event.START): State.BUSY,
    (State.BUSY, Event.END): State.IDLE,
    (State.IDLE, Event.LEAVE): State.GONE,
    (State.BUSY, Event.LEAVE): State.GONE,
}
MACHINE = Machine("A worker", TABLE, State.IDLE)


def test_an_event_leads_to_the_state_that_the_table_names():
    assert MACHINE.next(State.IDLE, Event.START) is State.BUSY
    assert MACHINE.possible(State.BUSY) == (Event.END, Event.LEAVE)
    assert MACHINE.final == (State.GONE,)


def test_an_event_that_the_table_does_not_have_is_refused_in_one_line():
    with pytest.raises(IllegalTransition, match=r"^A worker: END is not possible in IDLE; possible: START, LEAVE$"):
        MACHINE.next(State.IDLE, Event.END)
    with pytest.raises(IllegalTransition, match="possible: nothing"):
        MACHINE.next(State.GONE, Event.START)


def test_a_table_with_an_unreachable_state_or_an_unused_event_is_refused():
    with pytest.raises(ValueError, match="no events lead to GONE"):
        Machine("A worker", dict(list(TABLE.items())[:2]), State.IDLE)
    with pytest.raises(ValueError, match="no state has the events END"):
        Machine("A worker", {key: after for key, after in TABLE.items() if key[1] is not Event.END}, State.IDLE)


def test_the_picture_has_every_arrow_once():
    assert MACHINE.mermaid().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> IDLE",
        "    IDLE --> BUSY: START",
        "    IDLE --> GONE: LEAVE",
        "    BUSY --> IDLE: END",
        "    BUSY --> GONE: LEAVE",
        "    GONE --> [*]",
    ]

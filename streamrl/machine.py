"""A state machine as a table, which the code runs on and the documents are drawn from.

    class State(Enum): ...        class Event(Enum): ...

    LIFE = Machine("A group", {(State.WAITING, Event.ISSUE): State.ISSUED, ...}, State.WAITING)

    record.state = LIFE.next(record.state, Event.ISSUE)

A table is a literal dictionary at the top of its file, `NAME = Machine(...)`: `docs/reference.py` finds it there, and
writes its picture to docs/machines.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class IllegalTransition(Exception):
    """The table has no such event in that state."""


class Machine(Generic[S, E]):
    """States, events, and which event leads from which state to which.

    >>> from enum import Enum
    >>> Door = Enum("Door", "OPEN SHUT")
    >>> Act = Enum("Act", "PUSH PULL")
    >>> DOOR = Machine("A door", {(Door.OPEN, Act.PUSH): Door.SHUT, (Door.SHUT, Act.PULL): Door.OPEN}, Door.OPEN)
    >>> DOOR.next(Door.OPEN, Act.PUSH)
    <Door.SHUT: 2>
    >>> DOOR.next(Door.OPEN, Act.PULL)
    Traceback (most recent call last):
    streamrl.machine.IllegalTransition: A door: PULL is not possible in OPEN; possible: PUSH
    """

    def __init__(self, name: str, transitions: Mapping[tuple[S, E], S], initial: S) -> None:
        """Raises ValueError where a state cannot be reached or an event happens in no state."""
        self.name = name
        self.transitions = dict(transitions)
        self.initial = initial
        self.after: dict[S, dict[E, S]] = {state: {} for state in self.states}  # the same, by state and event
        for (before, event), after in self.transitions.items():
            self.after[before][event] = after
        self._check()

    def next(self, state: S, event: E) -> S:
        """The state that follows. Raises IllegalTransition."""
        try:
            return self.after[state][event]
        except KeyError:
            possible = ", ".join(other.name for other in self.possible(state)) or "nothing"
            problem = f"{self.name}: {event.name} is not possible in {state.name}; possible: {possible}"
            raise IllegalTransition(problem) from None

    def possible(self, state: S) -> tuple[E, ...]:
        """The events of a state, in the order of the table."""
        return tuple(self.after[state])

    def path(self, state: S, event: E) -> tuple[E, ...]:
        """The fewest events after which `event` is possible: none where it is possible already."""
        ways: dict[S, tuple[E, ...]] = {state: ()}
        reached = [state]
        for before in reached:
            if (before, event) in self.transitions:
                return ways[before]
            for between in self.possible(before):
                after = self.transitions[before, between]
                if after not in ways:
                    ways[after] = (*ways[before], between)
                    reached.append(after)
        raise IllegalTransition(f"{self.name}: {event.name} is never possible after {state.name}")

    @property
    def states(self) -> tuple[S, ...]:
        """All states, in the order of their enum."""
        return tuple(type(self.initial))

    @property
    def final(self) -> tuple[S, ...]:
        """The states that no event leaves."""
        return tuple(state for state in self.states if not self.possible(state))

    def mermaid(self) -> str:
        """The picture, for mermaid."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial.name}"]
        for (before, after), events in self._arrows().items():
            lines.append(f"    {before.name} --> {after.name}: {'<br/>'.join(events)}")
        lines += [f"    {state.name} --> [*]" for state in self.final]
        return "\n".join(lines)

    def _arrows(self) -> dict[tuple[S, S], list[str]]:
        """The names of the events that lead from one state to another, by (from, to) in the order of the states."""
        arrows: dict[tuple[S, S], list[str]] = {}
        for (before, event), after in self.transitions.items():
            arrows.setdefault((before, after), []).append(event.name)
        order = {state: index for index, state in enumerate(self.states)}
        return dict(sorted(arrows.items(), key=lambda arrow: (order[arrow[0][0]], order[arrow[0][1]])))

    def _check(self) -> None:
        reached = {self.initial}
        while following := {after for (before, _), after in self.transitions.items() if before in reached} - reached:
            reached |= following
        if unreached := [state.name for state in self.states if state not in reached]:
            raise ValueError(f"{self.name}: no events lead to {', '.join(unreached)}")
        happening = {event for _, event in self.transitions}
        if idle := [
            event.name for kind in {type(event) for event in happening} for event in kind if event not in happening
        ]:
            raise ValueError(f"{self.name}: no state has the events {', '.join(idle)}")

"""The batch of a learner step: put together once, the same when it is asked for again, let go behind the next one.

It decides from the state of the buffer. A decision becomes a record by `emit`, and a group that is too old for a step
goes to `drop`: both are the buffer's.
"""

from __future__ import annotations

from collections.abc import Callable

from streamrl.replay.adaptive import AdaptiveBound
from streamrl.replay.lives import Life
from streamrl.replay.orders.base import Order
from streamrl.replay.records import Consumed, Stored
from streamrl.replay.release_gate import ReleaseGate
from streamrl.replay.reuse import Reuse
from streamrl.replay.selection import Audit
from streamrl.replay.state import State


class Batches:
    """What the learner gets of a buffer."""

    def __init__(
        self,
        state: State,
        order: Order,
        gate: ReleaseGate,
        audit: Audit,
        *,
        reuse: Reuse,
        adaptive: AdaptiveBound,
        emit: Callable[[Consumed], None],
        drop: Callable[[Life, str], None],
    ) -> None:
        """drop(group, reason): it is generated again, with the same prompt."""
        self.trained = 0  # weights of this step contain the batch taken last
        self.reused = 0  # groups of the batch taken last that an earlier one had
        self._popped: int | None = None  # the step taken last, while its frames are in memory
        self._state = state
        self._order = order
        self._gate = gate
        self._reuse = reuse
        self._adaptive = adaptive
        self._audit = audit
        self._emit = emit
        self._drop = drop

    def pop(self, step: int) -> tuple[Stored, ...] | None:
        """The groups of a step, in order; None while they are not complete. Raises ValueError out of turn."""
        self._gate.asked(step)
        batch = self._again(step) if step in self._state.batches else self._new(step)
        if batch is not None:
            self._gate.delivered(step)
            self.trained, self.reused = step + 1, sum(stored.again for stored in batch)
        return batch

    def _again(self, step: int) -> tuple[Stored, ...]:
        return tuple(self._state.lives[group_id].stored(step) for group_id in self._state.batches[step])

    def _new(self, step: int) -> tuple[Stored, ...] | None:
        state = self._state
        if step != state.next_step:
            raise ValueError(f"step {step} was asked for, {state.next_step} is next")
        if self._popped is not None:
            self._let_go(self._popped)
        if len(state.completed) < self._order.fresh or (selected := self._select(step)) is None:
            return None
        ids, reused = selected
        lives = [state.lives[group_id] for group_id in ids]
        batch = tuple([life.stored(step) for life in lives])
        for life in lives[: len(ids) - len(reused)]:
            if life.completed is not None:
                self._audit.trained.add(life.completed)
        self._emit(Consumed(step=step, group_ids=ids, reused=reused))
        self._popped = step
        return batch

    def _select(self, step: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The groups of a step, and the last of them, which an earlier one had."""
        state = self._state
        for group_id in [i for i, oldest in state.completed.items() if self._order.over_age(step, oldest)]:
            self._audit.counts["over_age"] += 1
            self._drop(state.lives[group_id], f"too old for step {step}")
        fresh = state.floors.get(step + 1, 0) - state.below - len(state.above)  # what the bound needs: docs/bound.md
        places = self._order.groups_per_step - max(0, fresh)
        reused = state.reusable.select(step, self._adaptive.lowered)[: max(0, places)]
        fewer = (self._order.groups_per_step - len(reused),) if reused else ()
        ids = self._order.select(step, state.completed, state.below, state.above, *fewer)
        return None if ids is None else ((*ids, *reused), reused)

    def _let_go(self, step: int) -> None:
        """The learner has this batch: its frames go, and without a journal the step with them."""
        self._popped = None
        can_return = True
        for group_id in self._state.batches.get(step, ()):
            life = self._state.lives[group_id]
            if life.place is not None or not self._reuse.possible(life, self._state.next_step):
                life.frames = None
            can_return = can_return and life.place is not None
        if not can_return:
            self._state.forget_batch(step)

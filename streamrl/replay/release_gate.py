"""Which of the legal tickets go out now: what a release policy's lead time means in group ids.

    D(m) = when learner step m needs its groups: the learner asks for the next step one step's time after it got the
           last batch, or asks now; every further step takes as long
    a ticket of step m goes out from D(m) - lead on
    a step needs P groups, or, where groups are trained again, as many new ones as the last steps had in the mean

Whatever the policy says, nothing is held back that holding makes no younger, or that the learner waits for:

    steps up to v + k        v = acknowledged weights, k = `publish.every`: no newer weights come before these train
    the step that is asked for, and P groups more where it is asked for and nothing is out
    a group that had a ticket before

*Slow start.* Until STEPS steps of the learner are measured, and while the policy knows no lead time yet, as many steps
go out ahead of the learner as the workers generate at once, and RESERVE more, which make up for chance where both sides
are as fast. As early as is legal would be the whole bound within seconds: a slow learner would train it for as many
steps.

Pure, like the buffer: it reads the buffer's state, and is told the time. What it has measured is not durable: a service
that was started again starts slowly again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from streamrl.config.replay import ReplayConfig
from streamrl.replay.lives import NEVER, Life
from streamrl.replay.records import AnyRecord, Completed, Consumed, Issued
from streamrl.replay.releases import make_release
from streamrl.replay.releases.base import EARLIEST, Release
from streamrl.replay.state import State

STEPS = 4  # of the learner that must be measured first
RESERVE = 2  # that may be complete and wait, while nothing is measured
KEPT = 16  # whose median is the time of a step: one with a checkpoint is long, and no measure of the others
MOST = 1e9  # steps
ROUNDING = 1e-6  # of a step: what a sum of times may be off by

_AT_ONCE = -NEVER


def slow_start(config: ReplayConfig) -> int:
    """Learner steps, at most, until a lead time is known. Groups that are trained again measure nothing."""
    release = make_release(config)
    return max(STEPS, release.slow_start * config.reuse) if release.holds else 0


class ReleaseGate:
    """Holds tickets back. Times are in seconds, on the clock of `tick`."""

    def __init__(self, release: Release, state: State, publish_every: int) -> None:
        self.limit = NEVER  # first group id that is held back
        self.due_at = NEVER  # when the limit rises by itself
        self._release = release
        self._state = state
        self._groups = release.groups_per_step
        self._every = publish_every
        self._now = 0.0
        self._opened: dict[int, float] = {}  # groups that are out, in the order of their first tickets, and when
        self._came: list[float] = []  # first tickets of those that were completed since the last tick
        self._capacity = 0  # groups that the workers generate at once; 0: not known yet
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._new: deque[int] = deque(maxlen=KEPT)  # groups of the last steps that no earlier one had
        self._wanted: int | None = None  # the step that the learner asks for, or will ask for next
        self._asked = False
        self._delivered: float | None = None  # when it got the batch before
        self._lead = NEVER

    def tick(self, now: float, capacity: int | None = None) -> None:
        """It is `now`. `capacity`: groups that the workers generate at once, where that is known."""
        if not self._release.holds:
            return
        self._now = now
        if capacity:
            self._capacity = capacity
        for opened in self._came:
            self._release.completed(max(0.0, now - opened))
        self._came.clear()
        state, steps = self._state, self._decide(now)
        self.limit = state.below + len(state.above) + _whole(steps * self._needed)
        if self._asked and not state.lives.out and state.lives.first_waiting is None:
            self.limit = max(self.limit, state.next_id + self._groups)

    def record(self, record: AnyRecord) -> None:
        """What happens to groups."""
        if not self._release.holds:
            return
        match record:
            case Issued(ticket=ticket):
                self._opened.setdefault(ticket.group_id, self._now)
            case Completed(group_id=group_id):
                if (opened := self._opened.pop(group_id, None)) is not None:
                    self._came.append(opened)
            case Consumed(group_ids=group_ids, reused=reused):
                self._new.append(len(group_ids) - len(reused))

    def began(self, step: int, lives: Mapping[int, Life]) -> None:
        """A learner goes on from `step`; `lives`: the groups that it leaves."""
        self._opened = {i: at for i, at in self._opened.items() if i in lives and lives[i].completed is None}
        self._wanted, self._asked, self._delivered = step, False, None
        self.due_at = _AT_ONCE if self._release.holds else NEVER

    def asked(self, step: int) -> None:
        """The learner waits for the batch of `step`."""
        if not self._release.holds or (self._asked and step == self._wanted):
            return
        if self._delivered is not None and step == self._wanted:
            self._steps.append(self._now - self._delivered)
        self._wanted, self._asked, self.due_at = step, True, _AT_ONCE

    def delivered(self, step: int) -> None:
        """It gets it."""
        if self._release.holds:
            self._wanted, self._asked, self._delivered, self.due_at = step + 1, False, self._now, _AT_ONCE

    def metrics(self, legal: int) -> dict[str, float]:
        """What was decided last; `legal`: tickets that the bound allows. Nothing where none is ever held back."""
        if not self._release.holds:
            return {}
        held = max(0.0, legal - max(0.0, self.limit - self._state.next_id))
        lead = {} if self._lead == NEVER else {"release/lead": self._lead}
        return {"release/held": held, **lead, **self._release.metrics()}

    def _decide(self, now: float) -> float:
        """Steps that are not consumed, and whose tickets go out; NEVER for all of them."""
        self.due_at, self._lead = NEVER, NEVER
        lead = self._measured(now)
        if lead == EARLIEST:
            return NEVER
        state, acknowledged = self._state, self._state.acknowledged
        wanted = state.next_step if self._wanted is None else self._wanted
        steps = self._at_start() if lead is None else self._in_time(now, lead)
        fresh = min(state.next_step, acknowledged.step if acknowledged else 0) + self._every + 1
        return max(wanted + max(steps, int(self._asked)), fresh) - state.next_step

    @property
    def _needed(self) -> float:
        """New groups of a step."""
        return max(1.0, sum(self._new) / len(self._new)) if self._new else float(self._groups)

    def _measured(self, now: float) -> float | None:
        """The policy's lead time; None while it cannot be known."""
        if self._wanted is None or len(self._steps) < STEPS or median(self._steps) <= 0:
            return None
        rounds = max(1.0, self._needed / max(1, self._capacity))
        return self._release.lead((now - at for at in self._opened.values()), rounds)

    def _at_start(self) -> float:
        """Steps from the wanted one on that the workers generate at once, and what may wait."""
        return _whole(max(1, self._capacity) / self._needed) + RESERVE

    def _in_time(self, now: float, lead: float) -> int:
        """Steps from the wanted one on that are needed within the lead time; sets when there will be one more."""
        self._lead = lead = lead if lead > 0 else 0.0
        seconds = median(self._steps)
        asks = now if self._asked or self._delivered is None else max(now, self._delivered + seconds)
        steps = math.floor(min((now + lead - asks) / seconds, MOST) + ROUNDING) + 1
        if steps <= lead / seconds:  # later than that the learner asks, or is late itself
            self.due_at = asks + steps * seconds - lead
        return steps


def _whole(groups: float) -> float:
    """Rounded up."""
    return groups if groups == NEVER else math.ceil(groups - ROUNDING)

"""The batch on its way to the learner: asked for, complete, its record durable, sent.

A learner that asks for the same step again gets the same batch again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.observe.events import Events
from streamrl.replay.buffer import Stored
from streamrl.replay.durable import RETRY, DurableBuffer, Frame
from streamrl.replay.evaluations import Evaluations
from streamrl.replay.journal import JournalFull
from streamrl.replay.mismatches import Mismatches
from streamrl.replay.workers import Workers
from streamrl.stream.messages import MAX_REASON, BatchHeader, BatchStats

log = logging.getLogger(__name__)

_NOW = float("-inf")


@dataclass(frozen=True, slots=True)
class _Batch:
    header: BatchHeader
    groups: tuple[Stored, ...]
    mark: int  # of its record


class Delivery:
    """What the learner waits for.

    Usage:
        delivery.asked = 7
        header, frames = delivery.ready(time.monotonic())  # or None
        delivery.asked = None  # once it is sent
    """

    def __init__(self, durable: DurableBuffer, workers: Workers, events: Events) -> None:
        self.asked: int | None = None  # the step that the learner waits for
        self.evaluations = Evaluations()  # what they tell goes with the next batch
        self.mismatches = Mismatches()  # so does what these tell
        self._durable = durable
        self._workers = workers
        self._events = events
        self._batch: _Batch | None = None
        self._later = _NOW  # when the frames of the batch are tried again
        self._tokens = 0  # generated, in the groups accepted since the last batch

    @property
    def lost(self) -> int | None:
        """The step that was asked for, where its groups are generated again, though servers have had later weights."""
        buffer = self._durable.buffer
        newest = buffer.acknowledged
        if self.asked is None or newest is None or not buffer.next_step <= self.asked < newest.step:
            return None
        return self.asked

    def accepted(self, tokens: int) -> None:
        """Count a group."""
        self._tokens += tokens

    def forget(self) -> None:
        """The learner is gone, or starts again: what it asked for is void."""
        self.asked, self._batch = None, None

    def quarantined(self, step: int) -> None:
        """A group of this step is delivered otherwise from now on."""
        if self._batch is not None and self._batch.header.step == step:
            self._batch = None

    def ready(self, now: float) -> tuple[BatchHeader, Sequence[Frame]] | None:
        """The batch that was asked for, once it is complete and durable. Raises ValueError for a step out of turn."""
        if self.asked is None:
            return None
        if self._batch is None or self._batch.header.step != self.asked:
            self._batch = self._pop(self.asked, now)
        batch = self._batch
        if batch is None or not (self._durable.is_durable(batch.mark) or self._durable.commit(now)):
            return None
        if now < self._later:
            return None
        try:
            frames = self._durable.load(batch.header.step, batch.groups)
        except JournalFull as error:
            if self._later == _NOW:
                log.error("%s; the batch of step %d waits until one can", error, self.asked)
            self._later = now + RETRY
            return None
        self._later = _NOW
        if frames is None:
            self._batch = None
            return None
        return batch.header, frames

    def _pop(self, step: int, now: float) -> _Batch | None:
        """The batch of a step, if it is complete, with what happened since the one before."""
        buffer = self._durable.buffer
        again = step < buffer.next_step
        groups = buffer.pop(step)
        if groups is None:
            return None
        self._durable.append()
        verified, drafts = self._workers.drafts()
        stats = BatchStats(
            tokens_generated=self._tokens,
            generator_busy=self._workers.busy(),
            verified=verified,
            drafts=drafts,
            groups=buffer.groups,
            bytes=buffer.bytes,
            selection=buffer.selection_metrics(),
            evaluation=self.evaluations.metrics(step, now, again=again),
            mismatch=self.mismatches.metrics(step),
            bound=buffer.adaptive.reason()[:MAX_REASON],
        )
        self._tokens = 0
        ids = [stored.group_id for stored in groups]
        reused = [stored.group_id for stored in groups if stored.again]
        further = ({"reused": reused} if reused else {}) | self.evaluations.fields(step)
        self._events.emit(
            "batch", step=step, groups=len(groups), waiting=stats.groups, bytes=stats.bytes, group_ids=ids, **further
        )
        header = BatchHeader(
            step=step,
            groups=len(groups),
            stats=stats,
            ledger=self._durable.ledger(),
            quarantined=tuple(stored.group_id for stored in groups if stored.quarantined),
            reused=tuple(reused),
        )
        return _Batch(header, groups, self._durable.mark)

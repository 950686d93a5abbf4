"""Groups that the learner cannot train: placeholders take their place, and the run goes on.

    batch ──known ids? fits a row?──▶ ──can it be planned?──▶ ──did it fail before, in a rank's hands?──▶ trained
                 │ no                        │ no                        │ yes
                 └───────────────────────────┴───────────────────────────┴──▶ file, event, Quarantined to the service

Rank 0 decides all of it before a rank is told of the step. The service records it (`replay/records.py`), so that
the same group is delivered as placeholders whenever its step is delivered again, and `retrain` sees the same batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from streamrl.learner import bad_batch
from streamrl.learner.batches import BatchSource
from streamrl.learner.blame import Blames, GroupKey, folder_of
from streamrl.observe.events import EventLog
from streamrl.trainable import Limits, untrainable
from streamrl.types import Batch, Group

log = logging.getLogger(__name__)


class BadGroupsError(RuntimeError):
    """Too many groups in a row could not be trained; the text is the one line that the user reads."""


class Planner(Protocol):
    """What is asked of the trainer."""

    @property
    def limits(self) -> Limits:
        """What its model and its rows have room for."""
        ...

    def plan(self, batch: Batch) -> None:
        """Plan a step. Raises whatever its groups make it raise."""
        ...

    def rehearse(self, batch: Batch) -> None:
        """Pass every group through the model in rows of its own, without an update. Collective."""
        ...


class Quarantine:
    """What becomes of a batch before it is trained.

    Usage:
        batch = quarantine.sift(delivery.batch)  # with placeholders for what cannot be trained
        trainer.train_step(batch)
    """

    def __init__(self, planner: Planner, source: BatchSource, run_folder: Path, events: EventLog, limit: int) -> None:
        """`limit`: groups in a row after which `sift` raises; 0: never."""
        self._planner = planner
        self._source = source
        self._run_folder = run_folder
        self._events = events
        self._limit = limit
        self._blames = Blames(run_folder)
        self._in_a_row = 0

    def sift(self, batch: Batch, announce: Callable[[str], Any]) -> Batch:
        """The batch with placeholders for the groups that cannot be trained.

        `announce("rehearse")` tells the other ranks to take part in a rehearsal. Raises BadGroupsError at the last of
        `limit` such groups in a row, and what the planner raises where no group alone makes it raise.
        """
        bad = self._unfit(batch)
        batch = self._without(batch, bad)
        try:
            self._planner.plan(batch)
        except Exception as error:  # the policy for what nobody has thought of: the group that causes it is left out
            culprits = {group.group_id: reason for group in batch.groups if (reason := self._refusal(batch, group))}
            if not culprits:
                raise
            log.debug("a step could not be planned", exc_info=error)
            batch = self._without(batch, culprits)
            self._planner.plan(batch)
        if suspects := self._blames.suspects(batch.step):
            self._rehearse(batch, suspects, announce)
        self._count(batch)
        return batch

    def trained(self, step: int) -> None:
        """The step is trained: what its ranks have left is not needed any more."""
        self._blames.forget(step)

    def _unfit(self, batch: Batch) -> dict[int, str]:
        named = self._blames.named(batch.step)
        reasons = {
            group.group_id: named.get((group.group_id, group.attempt)) or untrainable(group, self._planner.limits)
            for group in batch.groups
            if group.group_id not in batch.quarantined
        }
        return {group_id: reason for group_id, reason in reasons.items() if reason}

    def _refusal(self, batch: Batch, group: Group) -> str | None:
        """Why a step of this group alone cannot be planned."""
        try:
            self._planner.plan(replace(batch, groups=(group,)))
        except Exception as error:  # as in `sift`
            return f"{type(error).__name__}: {error}"
        return None

    def _rehearse(self, batch: Batch, suspects: set[GroupKey], announce: Callable[[str], Any]) -> None:
        """A rank that fails in it names a single group; then the learner is started again.

        Where the step has none of the suspects any more, generated again or replaced, nothing is left to blame.
        """
        groups = tuple(group for group in batch.groups if (group.group_id, group.attempt) in suspects)
        if not groups:
            self._blames.forget(batch.step)
            return
        log.warning("step %d failed before: %d groups are tried one by one", batch.step, len(groups))
        announce("rehearse")
        self._planner.rehearse(replace(batch, groups=groups))
        self._blames.rehearsed(batch.step)
        self._planner.plan(batch)

    def _without(self, batch: Batch, bad: dict[int, str]) -> Batch:
        """Placeholders for these groups, which are kept in files; everyone is told of it."""
        for group in batch.groups:
            if (reason := bad.get(group.group_id)) is not None:
                self._keep(batch.step, group, reason)
        groups = tuple(group.emptied if group.group_id in bad else group for group in batch.groups)
        return replace(batch, groups=groups, quarantined=batch.quarantined | bad.keys()) if bad else batch

    def _keep(self, step: int, group: Group, reason: str) -> None:
        folder = folder_of(self._run_folder)
        path = folder / f"group_{group.group_id}_{group.attempt}.bin"
        try:
            folder.mkdir(exist_ok=True)
            kept = f"is kept in {bad_batch.save(Batch(step=step, groups=(group,)), path)}"
        except OSError as error:  # the disk is full: the step goes on without the group all the same
            kept = f"could not be kept: {error}"
        log.error("group %d cannot be trained and is quarantined: %s; it %s", group.group_id, reason, kept)
        self._events.emit(
            "learner.quarantined", step=step, group_id=group.group_id, attempt=group.attempt, reason=reason
        )
        self._source.quarantined(step, (group.group_id, group.attempt), reason)

    def _count(self, batch: Batch) -> None:
        for group in batch.groups:
            self._in_a_row = self._in_a_row + 1 if group.group_id in batch.quarantined else 0
            if self._limit and self._in_a_row >= self._limit:
                raise BadGroupsError(
                    f"{self._in_a_row} groups in a row could not be trained (learner.bad_groups: {self._limit}); "
                    f"they are kept in {folder_of(self._run_folder)}"
                )

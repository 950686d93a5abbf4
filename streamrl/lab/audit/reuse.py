"""What `replay.reuse` promises, counted from the batches of the journal: uses, places, ages, effective sample sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from streamrl.config.replay import ReplayConfig
from streamrl.replay.history import read_journal
from streamrl.replay.records import Began, Consumed, Lost, Measured
from streamrl.types import Batch, Group


class Uses:
    """How often each group was trained, by the batches so far."""

    def __init__(self, replay: ReplayConfig, bound: int | None) -> None:
        """`bound`: of what is trained for the first time; None: it has none."""
        self._replay = replay
        self._bound = bound
        self._uses: dict[int, tuple[int, int]] = {}  # group id: attempt, number of steps that had it
        self.again: frozenset[int] = frozenset()  # groups of the present batch that an earlier one had
        self.seen: frozenset[int] = frozenset()  # those of them whose earlier batch the history has

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._uses

    @property
    def most(self) -> int:
        """Uses of the group that has most."""
        return max((uses for _, uses in self._uses.values()), default=0)

    def begin(self, batch: Batch, *, whole: bool) -> Iterator[str]:
        """The next batch. Yields what is wrong with its groups as parts of one batch.

        `whole`: the history is; otherwise a group that the journal says to be trained again was so once before it.
        """
        ids = Counter(group.group_id for group in batch.groups)
        self.seen = frozenset(group_id for group_id in ids if group_id in self._uses)
        if not whole:
            before = (group for group in batch.groups if group.group_id in batch.reused - self.seen)
            self._uses |= {group.group_id: (group.attempt, 1) for group in before}
        self.again = frozenset(group_id for group_id in ids if group_id in self._uses)
        if double := sorted(group_id for group_id, count in ids.items() if count > 1):
            yield f"group {double[0]} twice in one batch"
        if self._replay.reuse > 1 and len(self.again) > self._replay.groups_per_step - self._replay.fresh:
            share = self._replay.reuse_share
            yield f"{len(self.again)} groups that an earlier step had; replay.reuse_share={share:g}"

    def problems(self, group: Group) -> Iterator[str]:
        """What is wrong with training this group, which an earlier step had, once more."""
        name, most, (attempt, uses) = f"group {group.group_id}", self._replay.reuse, self._uses[group.group_id]
        if uses >= most:
            yield _too_often(group.group_id, uses + 1, most)
        if attempt != group.attempt:
            yield f"attempt {group.attempt} of {name}, which was trained as attempt {attempt} before"

    def add(self, group: Group) -> None:
        """Count that a group is trained."""
        _, uses = self._uses.get(group.group_id, (0, 0))
        self._uses[group.group_id] = group.attempt, uses + 1

    def ages(self, batch: Batch) -> Iterator[tuple[int, int | None]]:
        """Age of the oldest token of each group, in learner steps, and what bounds it."""
        for group in batch.groups:
            is_again = group.group_id in self.again and self._replay.reuse > 1
            if (oldest := group.oldest) is not None:
                yield batch.step - oldest.step, self._replay.reuse_bound if is_again else self._bound


class Sizes:
    """The effective sample sizes by which groups were trained again, from the records of a journal in their order.

    What is a use again follows from the batches: that the service calls it one is only compared.
    """

    def __init__(self, replay: ReplayConfig, *, whole: bool = True) -> None:
        """`whole`: the journal has every step; otherwise a group may have been trained before it begins."""
        self._least = replay.reuse_min_ess
        self._most = replay.reuse
        self._whole = whole
        self._before: set[int] = set()  # groups that a step before the journal had, too
        self._steps: dict[int, tuple[int, ...]] = {}  # of the surviving history: their groups
        self._uses: dict[int, list[int]] = {}  # group id: these steps that had it
        self._told: dict[int, float | None] = {}  # group id: its size at the last of them, None for an unknown one

    def add(self, record: object) -> Iterator[str]:
        """The next record, of any kind. Yields what is wrong with it."""
        match record:
            case Consumed(step=step, group_ids=group_ids, reused=reused):
                self._undo(self._from(step))
                yield from self._problems(step, group_ids, frozenset(reused))
                self._steps[step] = group_ids
                for group_id in group_ids:
                    self._uses.setdefault(group_id, []).append(step)
                    self._told[group_id] = None
            case Measured(step=step, ess=values):
                newest = zip(self._steps.get(step, ()), values, strict=False)
                self._told |= {group_id: ess for group_id, ess in newest if self._uses[group_id][-1] == step}
            case Lost(step=step):
                self._undo(self._from(step))
            case Began(next_step=step, unknown=unknown):
                self._undo({*self._from(step), *unknown})

    def _problems(self, step: int, group_ids: tuple[int, ...], reused: Set[int]) -> Iterator[str]:
        again = {group_id for group_id in group_ids if group_id in self._uses}
        if not self._whole:  # batches that are gone count here alone
            self._before |= reused - again
            for group_id in sorted(again):
                if (uses := len(self._uses[group_id]) + (group_id in self._before) + 1) > self._most:
                    yield f"step {step} trained {_too_often(group_id, uses, self._most)}"
        for group_id in sorted(again):
            if (ess := self._told[group_id]) is None or ess < self._least:
                yield f"step {step} trained group {group_id} again, effective sample size {ess}"
        if again != reused and (self._whole or not again <= reused):
            yield f"step {step} trained {len(again)} groups that an earlier step had, its record names {len(reused)}"

    def _from(self, first: int) -> list[int]:
        return [step for step in self._steps if step >= first]

    def _undo(self, steps: Iterable[int]) -> None:
        """These were not trained as they were recorded; what they had measured counts no more."""
        for step in steps:
            for group_id in self._steps.pop(step, ()):
                self._told[group_id] = None
                self._uses[group_id].remove(step)
                if not self._uses[group_id]:
                    del self._uses[group_id]


def unmeasured(folder: Path, replay: ReplayConfig, *, whole: bool) -> Iterator[str]:
    """Which groups were trained again though their effective sample size was too small, or not known.

    `folder`: of the journal; `whole`: as `Sizes` takes it.
    """
    sizes = Sizes(replay, whole=whole)
    for entry in read_journal(folder):
        yield from sizes.add(entry.record)


def _too_often(group_id: int, uses: int, most: int) -> str:
    return f"group {group_id} {_nth(uses)} time" + (f"; replay.reuse={most}" if most > 1 else "")


def _nth(number: int) -> str:
    return {2: "a second", 3: "a third"}.get(number, f"a {number}th")

"""The consumed groups that later steps may train again: indexes of the lives, and what is kept for that.

Its records have a group's uses and effective sample size (`replay/lives.py`); `replay/reuse.py` says what is enough.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from streamrl.replay.lives import Life, Lives
from streamrl.replay.records import Measured
from streamrl.replay.reuse import Reuse
from streamrl.replay.supply import Supply


class Reusable:
    """Of the lives of a state. Empty where no group is trained again."""

    def __init__(self, reuse: Reuse, lives: Lives, groups_per_step: int) -> None:
        self.supply = Supply(groups_per_step) if reuse.active else None
        self.kept: set[int] = set()  # groups whose steps cannot be asked for any more
        self._reuse = reuse
        self._lives = lives
        self._measured: dict[int, None] = {}  # groups with an effective sample size that may be trained again

    @property
    def supplied(self) -> tuple[Supply, ...]:
        """The supply, where it is not P groups a step."""
        return () if self.supply is None else (self.supply,)

    @property
    def counts(self) -> dict[int, int]:
        """Of the supply, for the snapshot."""
        return {} if self.supply is None else dict(self.supply.counts)

    @property
    def named(self) -> dict[str, list[int]]:
        """What is kept, as a field of an event."""
        return {"kept": sorted(self.kept)} if self.kept else {}

    def load(self, counts: dict[int, int]) -> None:
        """The supply of a snapshot; {}: it is not known."""
        if self.supply is not None:
            self.supply.counts = dict(counts)

    def select(self, step: int, lowered: int = 0) -> tuple[int, ...]:
        """The groups that `step` trains again, where the admitted staleness is so many steps `lowered`."""
        able = [life for i in self._measured if (life := self._lives.get(i)) and self._reuse.possible(life, step)]
        self._measured = {life.group_id: None for life in able}  # steps that are taken back: `index`
        return self._reuse.select(step, able, lowered)

    def lacks(self, step: int, group_ids: Sequence[int], ess: Sequence[float | None]) -> bool:
        """Are these effective sample sizes of a consumed step's groups news?"""
        if not self._reuse.active or len(ess) != len(group_ids):
            return False
        lives = [self._lives.get(group_id) for group_id in group_ids]
        return any(
            life is not None and life.step == step and life.ess != each for life, each in zip(lives, ess, strict=True)
        )

    def measure(self, group_ids: Sequence[int], record: Measured) -> None:
        """The learner has trained these groups of a step."""
        for group_id, ess in zip(group_ids, record.ess, strict=False):
            if (life := self._lives.get(group_id)) is not None and life.step == record.step:
                life.ess = ess
                if ess is not None:
                    self._measured[group_id] = None

    def use(self, life: Life, step: int) -> None:
        """A step has consumed it."""
        life.former, life.step, life.ess = life.uses, step, None
        self._measured.pop(life.group_id, None)

    def take_back(self, life: Life, uses: tuple[int, ...] = ()) -> None:
        """Of the steps that had it only `uses` have it still; what the others measured is not known any more."""
        life.former, life.step, life.ess = uses[:-1], uses[-1] if uses else None, None
        self._measured.pop(life.group_id, None)
        if not uses:
            life.quarantined_from = 0  # whichever step is the first

    def forget(self, group_id: int) -> None:
        """There is no record of it any more."""
        self._measured.pop(group_id, None)
        self.kept.discard(group_id)

    def release(self, group_ids: Iterable[int], batches: Container[int], next_step: int) -> list[int]:
        """These groups' step cannot be asked for any more. Returns those that no other step has or may have."""
        over = []
        for group_id in group_ids:
            life = self._lives.get(group_id)
            if life is None or life.step in batches:
                continue
            if self._reuse.possible(life, next_step):
                self.kept.add(group_id)
            else:
                over.append(group_id)
        return over

    def over(self, batches: Container[int], next_step: int) -> list[int]:
        """Those that were kept, and cannot be trained again any more."""
        kept = [self._lives[group_id] for group_id in sorted(self.kept) if group_id in self._lives]
        self.kept = {life.group_id for life in kept if life.step not in batches}
        return [
            life.group_id for life in kept if life.group_id in self.kept and not self._reuse.possible(life, next_step)
        ]

    def index(self, batches: Container[int]) -> None:
        """Find everything again."""
        if self._reuse.active:
            consumed = [life for life in self._lives.values() if life.step is not None]
            self._measured = {life.group_id: None for life in consumed if life.ess is not None}
            self.kept = {life.group_id for life in consumed if life.step not in batches}

    def reach(self, next_step: int, settled: int, known: int) -> None:
        """The steps before `next_step` have consumed so many groups; none before `known` is asked for."""
        if self.supply is not None:
            self.supply.reach(next_step, settled)
            self.supply.forget(known - self._reuse.horizon)

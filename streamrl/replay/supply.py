"""How many groups the steps have consumed for the first time, where that is not P of each: `replay.reuse`.

C(v) is the number of groups that weights of step v contain, and the first id that they do not need not be vP any more.
What is not known any more is taken for P a step: C(v) is then too small, so that a ticket asks for newer weights than
it must, and no token is older than the bound (docs/bound.md).
"""

from __future__ import annotations


class Supply:
    """C(v), of the steps that matter still.

    >>> supply = Supply(groups_per_step=4)
    >>> supply.reach(1, 4), supply.reach(2, 6)  # step 1 took two groups that step 0 had
    (None, None)
    >>> supply.before(2), supply.before(3), supply.first_with(3), supply.first_with(4)
    (6, 10, 1, 2)
    """

    def __init__(self, groups_per_step: int) -> None:
        """Before the first step."""
        self._groups = groups_per_step
        self.counts = {0: 0}  # C(v) by v, ascending and without a gap; the last one is the next step's

    def reach(self, step: int, count: int) -> None:
        """`step` is the next, and the steps before it have consumed `count` groups."""
        before = {known: each for known, each in self.counts.items() if known < step and each <= count}
        self.counts = (before if step - 1 in before else {}) | {step: count}

    def forget(self, step: int) -> None:
        """No step before `step` matters."""
        if next(iter(self.counts)) < step:
            last = next(reversed(self.counts))
            self.counts = {known: each for known, each in self.counts.items() if known >= min(step, last)}

    def before(self, step: int) -> int:
        """C(step); of a step to come its largest value."""
        if (count := self.counts.get(step)) is not None:
            return count
        first, last = next(iter(self.counts)), next(reversed(self.counts))
        known = first if step < first else last
        return max(0, self.counts[known] + (step - known) * self._groups)

    def first_with(self, group_id: int) -> int:
        """The first step whose weights contain more than `group_id` groups, at least 0."""
        first = next(iter(self.counts))
        if self.counts[first] > group_id:  # ceil((C(first) - i) / P) - 1 steps before it
            return max(0, first - (self.counts[first] - group_id - 1) // self._groups)
        for step, count in self.counts.items():
            if count > group_id:
                return step
        last = next(reversed(self.counts))
        return last + (group_id - self.counts[last]) // self._groups + 1

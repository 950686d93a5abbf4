"""The groups of a run's journal: what became of them, how long their answers are, how old their trained tokens.

Counts, mean lengths and pass rates are of all groups that the journal has. Distributions need the groups' frames,
which are read of `GROUPS` groups at most, spread evenly over the run.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamrl.lab.report.runs import Run
from streamrl.recorded.journal import RecordedGroup, RunJournal
from streamrl.types import Group

log = logging.getLogger(__name__)

# whose frames are read for the distributions
GROUPS = 3000

# of a distribution at most: of longer answers a bin holds 2, 4, 8, ... lengths
BINS = 256

PASS_BINS = 10

TRAINED, DROPPED, WAITING, REPLACED = "trained", "dropped", "not trained yet", "replaced by a later attempt"


@dataclass(slots=True)
class Groups:
    """What the journal of a run says about its groups."""

    journal: RunJournal
    first_step: int | None = None  # that the journal still has
    read: int = 0  # groups whose frames were read
    unreadable: dict[tuple[int, int], str] = field(default_factory=dict)  # those whose could not be, by attempt: why
    lengths: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # fate: length: samples
    ages: Counter[int] = field(default_factory=Counter)  # staleness in steps: trained tokens

    @property
    def recorded(self) -> list[RecordedGroup]:
        """Every attempt that the journal has."""
        return self.journal.groups

    @property
    def by_step(self) -> dict[int, list[RecordedGroup]]:
        """The trained groups of each step."""
        steps: dict[int, list[RecordedGroup]] = {}
        for each in self.recorded:
            if each.step is not None:
                steps.setdefault(each.step, []).append(each)
        return dict(sorted(steps.items()))

    def load(self, recorded: RecordedGroup) -> Group | None:
        """The whole group; None, which is noted, where its frames are damaged, deleted, or of another version."""
        try:
            return self.journal.load(recorded)
        except ValueError as error:
            self.unreadable[recorded.group_id, recorded.attempt] = str(error)
            return None

    def report_missing(self) -> None:
        """One line in the log for all groups that could not be read."""
        if self.unreadable:
            reason = next(iter(self.unreadable.values()))
            log.warning("%s: %d groups are left out, the first: %s", self.journal.folder, len(self.unreadable), reason)

    def describe(self) -> dict[str, Any] | None:
        """As JSON; None without a journal, or with an empty one."""
        if not self.recorded:
            return None
        return {
            "first_step": self.first_step,
            "groups": len(self.recorded),
            "read": self.read,
            "unreadable": len(self.unreadable),
            "fates": list(self._fates()),
            "lengths": {fate: _binned(counts) for fate, counts in self.lengths.items()},
            "ages": sorted(self.ages.items()),
            "pass_rates": {fate: _pass_rates(self._of(fate)) for fate in (TRAINED, DROPPED) if self._of(fate)},
        }

    def _of(self, fate: str) -> list[RecordedGroup]:
        return [each for each in self.recorded if fate_of(each) == fate]

    def _fates(self) -> Iterable[dict[str, Any]]:
        """One row for all groups, one for each fate, and one for each reason of dropping where there are several."""
        yield _row("generated", self.recorded)
        for fate in (TRAINED, DROPPED, WAITING, REPLACED):
            if found := self._of(fate):
                yield _row(fate, found)
        reasons = sorted({each.reason for each in self.recorded if each.reason})
        for reason in reasons:
            yield {**_row(reason, [each for each in self.recorded if each.reason == reason]), "part": True}


def read_groups(run: Run) -> Groups:
    """Read the journal of a run; empty where there is none. May be used while the run goes on."""
    groups = Groups(RunJournal(run.folder))
    groups.journal.warn()
    groups.first_step = min(groups.by_step, default=None)
    stride = math.ceil(len(groups.recorded) / GROUPS)
    for recorded in groups.recorded[:: max(1, stride)]:
        if (group := groups.load(recorded)) is not None:
            _count(groups, recorded, group)
    return groups


def fate_of(recorded: RecordedGroup) -> str:
    """TRAINED, DROPPED, WAITING or REPLACED."""
    if recorded.step is not None:
        return TRAINED
    return {"dropped": DROPPED, "replaced": REPLACED}.get(recorded.state, WAITING)


def _count(groups: Groups, recorded: RecordedGroup, group: Group) -> None:
    """Add a group's lengths, and the ages of its trained tokens."""
    groups.read += 1
    groups.lengths[fate_of(recorded)].update(
        len(sample.output_ids) for sample in group.samples if not sample.is_placeholder
    )
    if recorded.step is None:
        return
    for sample in group.samples:
        ages, counts = np.unique(recorded.step - sample.token_steps()[sample.loss_mask], return_counts=True)
        groups.ages.update(dict(zip(ages.tolist(), counts.tolist(), strict=True)))


def _row(name: str, some: Sequence[RecordedGroup]) -> dict[str, Any]:
    """Number, mean output length and mean pass rate of some groups; lengths are over their answers."""
    answers, tokens = sum(each.answers for each in some), sum(each.tokens for each in some)
    return {
        "name": name,
        "groups": len(some),
        "tokens": tokens,
        "length": round(tokens / answers, 2) if answers else None,
        "pass_rate": round(sum(each.pass_rate for each in some) / len(some), 4),
    }


def _binned(counts: Counter[int]) -> dict[str, Any]:
    """`BINS` bins of a width that is a power of two: `{"width": 4, "counts": [[0, 17], [4, 9], ...]}`."""
    width = 1
    while counts and max(counts) // width >= BINS:
        width *= 2
    binned: Counter[int] = Counter()
    for length, count in counts.items():
        binned[length // width * width] += count
    return {"width": width, "counts": sorted(binned.items())}


def _pass_rates(some: Sequence[RecordedGroup]) -> list[int]:
    """Groups by pass rate: never right, `PASS_BINS` bins between, always right."""
    bins = [0] * (PASS_BINS + 2)
    for each in some:
        if each.pass_rate <= 0 or each.pass_rate >= 1:
            bins[-1 if each.pass_rate >= 1 else 0] += 1
        else:
            bins[1 + min(PASS_BINS - 1, int(each.pass_rate * PASS_BINS))] += 1
    return bins

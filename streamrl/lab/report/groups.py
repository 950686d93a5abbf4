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
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.lab.report.runs import Run
from streamrl.replay.history import Contents, read_journal
from streamrl.replay.records import Completed, Place
from streamrl.replay.segments import JournalDamaged, Opening, load_frames
from streamrl.stream.codec import decode_group
from streamrl.types import Group

log = logging.getLogger(__name__)

GROUPS = 3000
# whose frames are read for the distributions

BINS = 256
# of a distribution at most: of longer answers a bin holds 2, 4, 8, ... lengths

PASS_BINS = 10

TRAINED, DROPPED, WAITING, REPLACED = "trained", "dropped", "not trained yet", "replaced by a later attempt"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One attempt at a group."""

    record: Completed
    place: Place
    fate: str  # TRAINED, DROPPED, WAITING or REPLACED
    reason: str | None = None  # why it was dropped
    step: int | None = None  # that trained it


@dataclass(slots=True)
class Groups:
    """What the journal of a run says about its groups."""

    folder: Path
    recorded: list[Recorded] = field(default_factory=list)
    first_step: int | None = None  # that the journal still has
    read: int = 0  # groups whose frames were read
    unreadable: dict[Place, str] = field(default_factory=dict)  # and those whose could not be: why
    lengths: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # fate: length: samples
    ages: Counter[int] = field(default_factory=Counter)  # staleness in steps: trained tokens

    @property
    def by_step(self) -> dict[int, list[Recorded]]:
        """The trained groups of each step."""
        steps: dict[int, list[Recorded]] = {}
        for each in self.recorded:
            if each.step is not None:
                steps.setdefault(each.step, []).append(each)
        return dict(sorted(steps.items()))

    def load(self, recorded: Recorded) -> Group | None:
        """The whole group; None, which is noted, where its frames are damaged, deleted, or of another version."""
        try:
            return decode_group(*load_frames(self.folder, recorded.place))
        except (JournalDamaged, ValueError) as error:
            self.unreadable[recorded.place] = str(error)
            return None

    def tell(self) -> None:
        """One line in the log for all groups that could not be read."""
        if self.unreadable:
            reason = next(iter(self.unreadable.values()))
            log.warning("%s: %d groups are left out, the first: %s", self.folder, len(self.unreadable), reason)

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

    def _of(self, fate: str) -> list[Completed]:
        return [each.record for each in self.recorded if each.fate == fate]

    def _fates(self) -> Iterable[dict[str, Any]]:
        """One row for all groups, one for each fate, and one for each reason of dropping where there are several."""
        yield _row("generated", [each.record for each in self.recorded])
        for fate in (TRAINED, DROPPED, WAITING, REPLACED):
            if records := self._of(fate):
                yield _row(fate, records)
        reasons = sorted({each.reason for each in self.recorded if each.reason})
        for reason in reasons:
            records = [each.record for each in self.recorded if each.reason == reason]
            yield {**_row(reason, records), "part": True}


def read_groups(run: Run) -> Groups:
    """Read the journal of a run; empty where there is none. May be used while the run goes on."""
    groups = Groups(run.folder / "journal")
    contents, found = Contents(), []
    for entry in read_journal(groups.folder):
        if isinstance(entry.record, Opening):
            continue
        contents.add(entry.record)
        if isinstance(entry.record, Completed):
            found.append((entry.record, entry.place))
    step_of = contents.step_of()
    groups.recorded = [_with_fate(record, place, contents, step_of) for record, place in found]
    groups.first_step = min(groups.by_step, default=None)
    stride = math.ceil(len(found) / GROUPS)
    for recorded in groups.recorded[:: max(1, stride)]:
        if (group := groups.load(recorded)) is not None:
            _count(groups, recorded, group)
    return groups


def _with_fate(record: Completed, place: Place, contents: Contents, step_of: dict[int, int]) -> Recorded:
    if reason := contents.dropped.get((record.group_id, record.attempt)):
        return Recorded(record, place, DROPPED, reason)
    if contents.completed[record.group_id] != record.attempt:
        return Recorded(record, place, REPLACED)
    if (step := step_of.get(record.group_id)) is not None:
        return Recorded(record, place, TRAINED, step=step)
    return Recorded(record, place, WAITING)


def _count(groups: Groups, recorded: Recorded, group: Group) -> None:
    """Add a group's lengths, and the ages of its trained tokens."""
    groups.read += 1
    groups.lengths[recorded.fate].update(len(sample.output_ids) for sample in group.answered)
    if recorded.step is None:
        return
    for sample in group.samples:
        ages, counts = np.unique(recorded.step - sample.token_steps()[sample.loss_mask], return_counts=True)
        groups.ages.update(dict(zip(ages.tolist(), counts.tolist(), strict=True)))


def _row(name: str, records: Sequence[Completed]) -> dict[str, Any]:
    """Number, mean output length and mean pass rate of some groups; lengths are over their answers."""
    answers, tokens = sum(record.answers for record in records), sum(record.tokens for record in records)
    return {
        "name": name,
        "groups": len(records),
        "tokens": tokens,
        "length": round(tokens / answers, 2) if answers else None,
        "pass_rate": round(sum(record.pass_rate for record in records) / len(records), 4),
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


def _pass_rates(records: Sequence[Completed]) -> list[int]:
    """Groups by pass rate: never right, `PASS_BINS` bins between, always right."""
    bins = [0] * (PASS_BINS + 2)
    for record in records:
        if record.pass_rate <= 0 or record.pass_rate >= 1:
            bins[-1 if record.pass_rate >= 1 else 0] += 1
        else:
            bins[1 + min(PASS_BINS - 1, int(record.pass_rate * PASS_BINS))] += 1
    return bins

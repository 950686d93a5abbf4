"""What the rewards of a batch are made of: the mean of each reward part, under a bounded number of names."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from streamrl.tasks.environment import FAILED
from streamrl.types import Batch

PREFIX = "reward/part/"

MOST = 32
"""Names of a run. Every sink keeps a series for each name that it ever saw, and a row has some hundred numbers: a task
that names its parts after its prompts would make both endless."""

LONGEST = 64
"""Characters of a name: what a legend shows, and no sink refuses."""


class RewardParts:
    """The first MOST names of a run keep their places.

    Usage:
        parts = RewardParts(read_metrics(run_folder))  # the rows of former starts
        row |= parts.of(batch)
    """

    def __init__(self, former: Iterable[Mapping[str, Any]] = ()) -> None:
        self._names: dict[str, None] = {}  # in the order in which they came
        for row in former:
            self._admit(name.removeprefix(PREFIX) for name in row if name.startswith(PREFIX))

    def of(self, batch: Batch) -> dict[str, float]:
        """`reward/part/NAME`: mean over the new rollouts that have the part; placeholders have none.

        The part of a failed scorer is left out: `reward/failed` counts it. Names that are one when they are
        `sanitised` share a mean. `reward/parts_left_out`, where there are any: names beyond MOST.
        """
        values: dict[str, list[float]] = defaultdict(list)
        for sample in (sample for group in batch.fresh for sample in group.answered):
            for name, value in sample.reward_parts.items():
                if name != FAILED:
                    values[sanitised(name)].append(value)
        self._admit(sorted(values))
        means = {PREFIX + name: sum(values[name]) / len(values[name]) for name in self._names if name in values}
        left_out = len(values) - len(means)
        return means | ({"reward/parts_left_out": left_out} if left_out else {})

    def _admit(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._names) < MOST:
                self._names.setdefault(name)


@functools.lru_cache(maxsize=1024)  # a batch has the same few names thousands of times
def sanitised(name: str) -> str:
    """A name as a part of a metric's name: letters, digits, `_`, `-` and `.`.

    >>> sanitised("format ok?/2")
    'format_ok__2'
    """
    return re.sub(r"[^\w.-]", "_", name)[:LONGEST] or "_"

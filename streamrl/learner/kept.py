"""The replay of the sampling's truncation: which tokens of a rank's share of the vocabulary a draw could not give."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from streamrl.sampling_columns import KeptSets

# In place of a log-prob that is -inf: its exponential is 0 in float32 and float64, and 0 times it is 0.
BELOW = -1e4


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The kept sets of n targets, on their device; a target without one keeps the whole vocabulary.

    Example: `Kept.of(KeptSets(counts=[2, 0], ids=[3, 8]), device)` has `rows=[0, 0], ids=[3, 8], ends=[0, 2, 2],
    truncated=[True, False]`.
    """

    ids: Tensor  # int64 [K]
    rows: Tensor  # int64 [K], the target of each id
    ends: list[int]  # [n + 1]: the ids of target t are those from ends[t] to ends[t + 1]
    truncated: Tensor  # bool [n], whether the target has a set

    @classmethod
    def of(cls, sets: KeptSets, device: torch.device) -> Kept | None:
        """None where no target has a set."""
        if not len(sets.ids):
            return None
        counts = torch.from_numpy(sets.counts)
        return cls(
            ids=torch.from_numpy(sets.ids).to(device),
            rows=torch.repeat_interleave(torch.arange(len(counts)), counts).to(device),
            ends=list(accumulate(sets.counts.tolist(), initial=0)),
            truncated=(counts > 0).to(device),
        )

    def dropped(self, part: slice, first: int, size: int) -> Tensor | None:
        """bool [targets of the part, size]: which of the ids first ... first + size - 1 were dropped before the draw.

        None where no target of the part has a set.
        """
        truncated = self.truncated[part]
        begin, end = self.ends[part.start], self.ends[part.start + len(truncated)]
        if begin == end:
            return None
        dropped = truncated[:, None].repeat(1, size)
        local = self.ids[begin:end] - first
        here = (local >= 0) & (local < size)
        dropped[(self.rows[begin:end] - part.start)[here], local[here]] = False
        return dropped

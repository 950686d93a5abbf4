"""How a sample carries how its tokens were drawn: the sets that truncation kept, and temperatures of its own.

`Sample.extras` has columns of the output's length alone, so the sets are folded into rows of equal length:

    kept_counts           uint16 [T]    tokens of the set that each one was drawn from; 0: the whole vocabulary
    kept_ids              int32 [T, W]  the sets one behind the other, each ascending, -1 behind the last
    sampling_temperature  float64 [T]   of each token; 0: Group.temperature

Top-p, top-k and min-p decide which tokens a draw may give. The generator records them. The code that computes the
log-prob again (learner, audit) makes the same ones sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.types import Sample

# Names of the columns in `Sample.extras`.
COUNTS, IDS, TEMPERATURE = "kept_counts", "kept_ids", "sampling_temperature"

# Follows the last set.
NONE = -1

# Ids of any vocabulary are below it.
ANY_VOCABULARY = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The sets from which N tokens were drawn, one behind the other; a count of 0 means the whole vocabulary.

    Example: `KeptSets(counts=[2, 0, 1], ids=[3, 8, 5])`: token 0 was drawn from {3, 8}, token 2 could be 5 alone.
    """

    counts: np.ndarray  # int64 [N]
    ids: np.ndarray  # int64 [sum of counts]

    @classmethod
    def whole(cls, tokens: int) -> KeptSets:
        """The sets of tokens that were drawn from the whole vocabulary."""
        return cls(np.zeros(tokens, np.int64), np.zeros(0, np.int64))

    @classmethod
    def joined(cls, parts: Sequence[KeptSets]) -> KeptSets:
        return cls(np.concatenate([each.counts for each in parts]), np.concatenate([each.ids for each in parts]))

    def __len__(self) -> int:
        return len(self.counts)

    def where(self, chosen: np.ndarray) -> KeptSets:
        """Those of some tokens, bool [N]."""
        return KeptSets(self.counts[chosen], self.ids[np.repeat(chosen, self.counts)])

    def columns(self) -> dict[str, np.ndarray]:
        """As `Sample.extras` carries them; none where every token was drawn from the whole vocabulary."""
        if not len(self.ids):
            return {}
        tokens = len(self.counts)
        width = math.ceil(len(self.ids) / tokens)
        folded = np.full(tokens * width, NONE, np.int32)
        folded[: len(self.ids)] = self.ids
        return {COUNTS: self.counts.astype(np.uint16), IDS: folded.reshape(tokens, width)}


def kept_columns(sets: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """The columns of T tokens, of the ids from which each was drawn, in any order.

    >>> {name: column.tolist() for name, column in kept_columns([[8, 3], [5]]).items()}
    {'kept_counts': [2, 1], 'kept_ids': [[3, 8], [5, -1]]}
    """
    counts = np.array([len(each) for each in sets], np.int64)
    ids = np.array([token for each in sets for token in sorted(each)], np.int64)
    return KeptSets(counts, ids).columns()


def temperature_column(tokens: int, temperature: float) -> dict[str, np.ndarray]:
    """The column of tokens that were drawn at another temperature than the group's."""
    return {TEMPERATURE: np.full(tokens, temperature, np.float64)} if tokens else {}


def kept_sets(sample: Sample) -> KeptSets | None:
    """The kept sets of a sample without a `problem`; None where all tokens were drawn from the whole vocabulary."""
    return _unfolded(sample.extras) if COUNTS in sample.extras else None


def temperatures(sample: Sample, of_group: float) -> np.ndarray:
    """At which each output token was drawn, float64 [T]."""
    own = sample.extras.get(TEMPERATURE)
    return np.full(len(sample.output_ids), of_group) if own is None else np.where(own == 0, of_group, own)


def beginning(sample: Sample, tokens: int) -> dict[str, np.ndarray]:
    """The columns of the first output tokens of a sample."""
    sets, own = kept_sets(sample), sample.extras.get(TEMPERATURE)
    columns = {} if own is None else {TEMPERATURE: own[:tokens]}
    return columns if sets is None else columns | sets.where(np.arange(len(sets)) < tokens).columns()


def joined(parts: Sequence[tuple[int, Mapping[str, np.ndarray]]]) -> dict[str, np.ndarray]:
    """The columns of parts of an output one behind the other, (tokens, `extras`) of each.

    What was not drawn, or as the run is configured, needs no columns.
    """
    columns: dict[str, np.ndarray] = {}
    if any(COUNTS in extras for _, extras in parts):
        sets = [_unfolded(extras) if COUNTS in extras else KeptSets.whole(tokens) for tokens, extras in parts]
        columns |= KeptSets.joined(sets).columns()
    if any(TEMPERATURE in extras for _, extras in parts):
        own = [extras.get(TEMPERATURE, np.zeros(tokens, np.float64)) for tokens, extras in parts]
        columns[TEMPERATURE] = np.concatenate(own)
    return columns


def problem(sample: Sample, vocabulary: int = ANY_VOCABULARY) -> str | None:
    """What is wrong with the columns of a sample that is well formed otherwise; None where nothing is."""
    own = sample.extras.get(TEMPERATURE)
    if own is not None and not (_has(own, np.dtype(np.float64), 1) and (np.isfinite(own) & (own >= 0)).all()):
        return f"{TEMPERATURE}: float64 [T] of finite numbers from 0 on is needed"
    counts, folded = sample.extras.get(COUNTS), sample.extras.get(IDS)
    if counts is None and folded is None:
        return None
    if counts is None or folded is None:
        return f"{COUNTS} and {IDS} go together"
    if not (_has(counts, np.dtype(np.uint16), 1) and _has(folded, np.dtype(np.int32), 2)):
        return f"{COUNTS}: uint16 [T] and {IDS}: int32 [T, W] are needed"
    total, flat = int(counts.sum(dtype=np.int64)), folded.reshape(-1)
    if total > len(flat) or (flat[total:] != NONE).any():
        return f"{IDS} does not hold the {total} ids of {COUNTS}"
    return _wrong_set(sample, counts.astype(np.int64), flat[:total].astype(np.int64), vocabulary)


def _wrong_set(sample: Sample, counts: np.ndarray, ids: np.ndarray, vocabulary: int) -> str | None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocabulary):
        return f"{IDS}: an id is not below the vocabulary of {vocabulary}"
    first = np.zeros(len(ids) + 1, np.bool_)
    first[np.cumsum(counts) - counts] = True  # that of an empty set is the next one's, or behind the last
    if not (np.diff(ids) > 0)[~first[1 : len(ids)]].all():
        return f"{IDS}: the ids of a token do not ascend"
    # In an ascending set an id is there once at most.
    drawn = np.count_nonzero(ids == np.repeat(sample.output_ids, counts))
    if drawn != np.count_nonzero(counts):
        return f"{IDS}: a token is not in the set from which it was drawn"
    return None


def _unfolded(extras: Mapping[str, np.ndarray]) -> KeptSets:
    counts = extras[COUNTS].astype(np.int64)
    return KeptSets(counts, extras[IDS].reshape(-1)[: counts.sum()].astype(np.int64))


def _has(column: np.ndarray, dtype: np.dtype, dimensions: int) -> bool:
    return column.dtype == dtype and column.ndim == dimensions

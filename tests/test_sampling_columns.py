"""The columns in which a sample carries how it was drawn: folded, unfolded, joined, and refused where wrong."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl import sampling_columns
from streamrl.sampling_columns import (
    COUNTS,
    IDS,
    TEMPERATURE,
    KeptSets,
    beginning,
    joined,
    kept_columns,
    kept_sets,
    temperatures,
)
from streamrl.trainable import Limits, untrainable
from streamrl.types import Group, PolicyVersion, Sample, VersionSpan, all_trained

SETS = [[9, 3, 5], [7], [], [2, 4]]  # the third token could be any


def sample(**extras: np.ndarray) -> Sample:
    return Sample(
        prompt_ids=np.array([1], np.int32),
        output_ids=np.array([5, 7, 6, 2], np.int32),
        logprobs=np.zeros(4, np.float32),
        loss_mask=all_trained(4),
        spans=(VersionSpan(PolicyVersion(0), 0, 4),),
        reward=0.0,
        extras=extras,
    )


def test_sets_come_back_ascending_by_token_and_cut_as_the_tokens_are():
    sets = kept_sets(sample(**kept_columns(SETS)))
    assert (sets.counts.tolist(), sets.ids.tolist()) == ([3, 1, 0, 2], [3, 5, 9, 7, 2, 4])
    some = sets.where(np.array([False, True, True, True]))
    assert (some.counts.tolist(), some.ids.tolist()) == ([1, 0, 2], [7, 2, 4])
    assert kept_columns([[], []]) == {}
    assert kept_sets(sample()) is None


def test_parts_of_an_output_are_joined_where_only_some_have_columns():
    turns = [(4, kept_columns(SETS)), (2, {}), (1, {TEMPERATURE: np.array([0.5])})]
    columns = joined(turns)
    whole = replace(sample(**columns), output_ids=np.array([5, 7, 6, 2, 1, 1, 8], np.int32))
    assert kept_sets(whole).counts.tolist() == [3, 1, 0, 2, 0, 0, 0]
    assert temperatures(whole, 0.9).tolist() == [0.9] * 6 + [0.5]
    assert sampling_columns.problem(whole, vocabulary=10) is None
    assert joined([(4, {}), (2, {})]) == {}
    assert kept_sets(replace(sample(), extras=beginning(whole, 3))).ids.tolist() == [3, 5, 9, 7]
    assert len(KeptSets.whole(3)) == 3


def changed(name: str, place: tuple[int, ...], value: float) -> dict[str, np.ndarray]:
    columns = {**kept_columns(SETS), TEMPERATURE: np.ones(4)}
    columns[name][place] = value
    return columns


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (kept_columns(SETS), None),
        (changed(IDS, (0, 0), 5), "do not ascend"),  # twice
        (changed(IDS, (0, 0), 6), "do not ascend"),
        (changed(IDS, (0, 1), 4), "not in the set"),
        (changed(IDS, (1, 0), 10), "vocabulary of 10"),
        (changed(IDS, (0, 0), -1), "vocabulary of 10"),
        (changed(COUNTS, (2,), 3), "does not hold"),
        (changed(COUNTS, (3,), 1), "does not hold"),
        (changed(TEMPERATURE, (1,), np.nan), TEMPERATURE),
        (changed(TEMPERATURE, (1,), -1.0), TEMPERATURE),
        ({COUNTS: kept_columns(SETS)[COUNTS]}, "go together"),
        ({**kept_columns(SETS), COUNTS: np.array([3.0, 1, 0, 2])}, "uint16"),
    ],
)
def test_the_door_refuses_columns_that_say_something_impossible(columns, reason):
    group = Group(group_id=1, task="copy", prompt_index=0, samples=(sample(**columns),))
    found = untrainable(group, Limits(vocabulary=10, tokens=100))
    assert (found is None) if reason is None else (reason in found)

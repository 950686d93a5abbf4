"""Weighted tasks: quotas in every block, places, and the prompts that they take."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config
from streamrl.config.replay import ReplayConfig
from streamrl.replay.curricula.base import Curriculum
from streamrl.replay.shares import Shares, make_shares
from streamrl.testing.curricula import CurriculumConformance


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=8), groups=st.integers(8, 64))
def test_quotas_fill_the_block_leave_nobody_out_and_are_next_to_their_share(weights: list[float], groups: int) -> None:
    shares = Shares({f"t{i}": weight for i, weight in enumerate(weights)}, groups)
    assert sum(shares.quotas.values()) == groups
    assert min(shares.quotas.values()) >= 1
    for i, weight in enumerate(weights):
        share = groups * weight / sum(weights)
        assert shares.quotas[f"t{i}"] < share + 1
        assert shares.quotas[f"t{i}"] > share - len(weights)  # those with at least one are paid by the others


def test_the_largest_remainders_get_what_is_left_and_a_tiny_weight_gets_one() -> None:
    assert Shares({"a": 5, "b": 3, "c": 1}, 10).quotas == {"a": 6, "b": 3, "c": 1}
    assert Shares({"a": 1, "b": 1, "c": 1}, 8).quotas == {"a": 3, "b": 3, "c": 2}
    assert Shares({"a": 1000, "b": 1}, 8).quotas == {"a": 7, "b": 1}


@given(st.integers(0, 1000))
def test_every_block_has_the_same_places(block: int) -> None:
    shares = Shares({"a": 5, "b": 3, "never": 0}, 8)
    tasks = [shares.task(8 * block + place) for place in range(8)]
    assert tasks == [shares.task(place) for place in range(8)]
    assert Counter(tasks) == {"a": 5, "b": 3}


def test_a_task_is_spread_over_the_block() -> None:
    shares = Shares({"a": 6, "b": 2}, 8)
    assert [place for place in range(8) if shares.task(place) == "b"] in ([1, 5], [2, 5], [2, 6], [1, 6])


def test_shares_come_from_the_mix_or_from_the_one_task() -> None:
    mix = [{"label": "math", "name": "copy", "weight": 3}, {"name": "successor"}]
    config = Config.model_validate({"task": {"mix": mix}, "replay": {"groups_per_step": 4}})
    assert make_shares(config).quotas == {"math": 3, "successor": 1}
    assert make_shares(Config()).quotas == {"copy": 8}


def test_more_tasks_than_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="3 tasks with a weight share 2 groups"):
        Shares({"a": 1, "b": 1, "c": 1}, 2)


class TestSequential(CurriculumConformance):
    name = "sequential"


class Twice(Curriculum):
    """Every prompt twice, and nothing says so."""

    each_prompt_once = True

    def choose(self, task: str, count: int) -> int:
        return count // 2


def test_a_curriculum_that_asks_a_prompt_again_without_saying_so_is_found_out() -> None:
    kit = CurriculumConformance()
    kit.name = f"{__name__}:Twice"
    with pytest.raises(AssertionError):
        kit.test_a_prompt_comes_twice_only_where_it_says_so()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("harder", "allowed: one of sequential, package.module:Class or path/file.py:Class"),
        ("no_such_module:Class", "cannot be loaded"),
        ("collections:NoSuchClass", "cannot be loaded"),
        ("collections:Counter", "is no subclass of streamrl.replay.curricula.base.Curriculum"),
    ],
)
def test_a_curriculum_that_is_not_there_is_refused_by_name(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReplayConfig(curriculum=name)
